"""Pure tensor mathematics: tensors in, tensors out.

These files know no modules, files, devices, configurations or global randomness.
"""
