"""The errors that a user can cause: each says what was found, what was expected and what to do.

This module knows no other: everything may raise these, and only the command line turns them into exit codes.
"""


class PacelineError(Exception):
    """A fault of the user, of a file or of a configuration; its text is one line that a person can act on."""


class ConfigError(PacelineError):
    """A recipe, an option or a combination of options that cannot be honoured."""


class DataError(PacelineError):
    """Rows, prompts or captured features that cannot be used."""


class CheckpointError(PacelineError):
    """A draft folder, a weight file or a captured shard that is missing, torn, foreign or incomplete."""


class TargetError(PacelineError):
    """A target model that cannot be loaded, or whose cache cannot be verified and rolled back exactly."""


class Interrupted(PacelineError):
    """Ctrl-C during long work; the text says what is kept and how to go on."""


class UnsupportedOption(PacelineError):
    """A generation option that speculative decoding cannot honour exactly; the text names the option."""


class UnsupportedExport(PacelineError):
    """An architecture or a setting that a foreign format cannot express."""
