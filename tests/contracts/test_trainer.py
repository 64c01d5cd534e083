"""The training loop: the right gradient, the same weights after a kill, no NaN, no silence about what it does."""

import dataclasses
import functools
import json
import os
import signal
import socket

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from fixtures_kill import die_at_flush, die_at_rename, in_child
from fixtures_models import make_target, tiny_llama
from fixtures_text import tiny_tokenizer
from fixtures_training import (
    RECIPE,
    Onlooker,
    counting_target,
    events,
    last_state,
    random_target,
    recipe_of,
    write_rows,
)
from paceline.errors import ConfigError, DataError
from paceline.records import LossTerms
from paceline.store.checkpoint import load_draft
from paceline.store.training_state import saved_states
from paceline.training.optimizers import Optimizers
from paceline.training.prepare import prepare
from paceline.training.sources import FrozenTarget, OnlineFeatures
from paceline.training.trainer import Trainer, train
from paceline.training.window import GradientWindow, LossModule


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", count=24)


def run(recipe, out, target, **options):
    watch = Onlooker()
    result = train(recipe, out=out, watch=watch, target=target, **options)
    return result, watch


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_cycle_is_learnt_and_the_best_draft_is_kept(tmp_path):
    target = counting_target()
    rows = write_rows(tmp_path / "rows.jsonl", count=10, answer="one two three four five six seven eight nine ten one")
    recipe = recipe_of(rows, "training.steps=60", "training.validate_every=20", "training.learning_rate=3e-3")
    result, watch = run(recipe, tmp_path / "out", target)
    assert result.best == 11 / 3  # the 11 tokens after the first in three rounds of at most four: the most there is
    lines = [event for event in events(tmp_path / "out") if event["event"] == "train"]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["padding"] < 0.1
    loaded = load_draft(tmp_path / "out" / "best", target=target, warn=pytest.fail)
    assert loaded.info.notes["accepted_length"] == result.best
    assert loaded.info.notes["step"] == result.best_step
    assert "1 of 10 examples are held out" in watch.text


def test_a_draft_that_knows_its_own_rows_only_is_told_apart(tmp_path):
    target = counting_target()
    rows = write_rows(tmp_path / "rows.jsonl", count=10, answer="one two three four five six seven eight nine ten one")
    other = write_rows(tmp_path / "other.jsonl", count=10)
    changes = ["training.steps=60", "training.validate_every=20", "training.learning_rate=3e-3"]
    recipe = recipe_of(rows, *changes, f'data.validation=["{other}"]')
    _, watch = run(recipe, tmp_path / "out", target)
    warnings = [line for line in watch.said if "on held-out rows it is" in line]
    assert warnings and warnings[-1].startswith("warning: ")
    honest, watch = run(recipe_of(rows, *changes), tmp_path / "same", target)
    assert honest.best == 11 / 3 and "on held-out rows it is" not in watch.text


KILLS = {
    "before anything is saved": lambda: die_at_flush(1, where=".last.partial"),
    "inside the first state": lambda: die_at_flush(2, where=".step-00000002.partial"),
    "before the first state has its name": lambda: die_at_rename(1, where=".step-00000002.partial"),
    "after the state, before older ones go": lambda: die_at_flush(3, where="/state"),
    "inside the best draft": lambda: die_at_flush(3, where=".best.partial"),
    "between the two renames of the folder last": lambda: die_at_rename(2, where=".last.partial"),
    "inside a later state": lambda: die_at_flush(4, where=".step-00000006.partial"),
    "between two saves": lambda: None,  # the onlooker kills at step 5
}


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_run_resumes_bit_for_bit(tmp_path, target, kill, straight):
    """Acceptance 23: weights, moments, random states, counters, order of the data, best score, log."""
    recipe, expected, whole = straight

    def begin():
        KILLS[kill]()
        watch = Onlooker(die_at=5 if kill == "between two saves" else None)
        train(recipe, out=tmp_path / "killed", watch=watch, target=target)

    assert in_child(begin) == -signal.SIGKILL
    resumed, _ = run(recipe, tmp_path / "killed", target, resume=True)
    assert resumed.best == expected.best
    assert same(last_state(tmp_path / "killed"), last_state(whole))
    runs = (tmp_path / "killed", whole)
    states = [json.loads((saved_states(out / "state")[-1] / "state.json").read_text()) for out in runs]
    for state in states:
        del state["values"]["counters"]["seconds"], state["values"]["counters"]["meter"]
    assert states[0]["values"] == states[1]["values"]
    assert events(tmp_path / "killed") == events(whole)
    assert not list((tmp_path / "killed").rglob("*.partial-*"))
    assert same(*(load_draft(out / "best").draft.state_dict() for out in runs))


@pytest.fixture(scope="module", params=["adamw", "muon"])
def straight(tmp_path_factory, target, request):
    """(recipe, result, folder) of a run of nine steps without an interruption."""
    folder = tmp_path_factory.mktemp("straight")
    changes = ["training.steps=9", "training.accumulation=3", "training.save_every=2", "training.validate_every=3"]
    changes.append("training.log_every=4")  # a line sums steps from before and after a kill
    changes.append(f"training.optimizer={request.param}")
    recipe = recipe_of(write_rows(folder / "rows.jsonl", count=24), *changes)
    result, _ = run(recipe, folder / "out", target)
    return recipe, result, folder / "out"


def test_muon_moves_the_layers_matrices_and_adamw_the_head_and_the_gains(rows, target):
    recipe = recipe_of(
        rows, "training.optimizer=muon", "training.muon_learning_rate=0.5", "training.learning_rate=0.25"
    )
    draft = prepare(recipe, target=target, init_from=None, say=lambda line: None).draft
    optimizers = Optimizers(draft, recipe.training)
    before = {name: weight.detach().clone() for name, weight in draft.named_parameters()}
    torch.manual_seed(0)
    for weight in draft.parameters():
        weight.grad = torch.randn_like(weight)
    optimizers.step(share=0.5)
    moved = {name: weight.detach() - before[name] for name, weight in draft.named_parameters()}
    for name, change in moved.items():
        if change.dim() == 2 and name != "lm_head.weight":  # all directions alike, 0.2 sqrt(longer side) of the rate
            strengths = torch.linalg.svdvals(change) / (0.25 * 0.2 * max(change.shape) ** 0.5)
            assert float(strengths.min()) > 0.5 and float(strengths.max()) < 1.4, name
        else:  # the first step of Adam: the sign of the gradient times the rate
            assert torch.allclose(change.abs(), torch.full_like(change, 0.125), rtol=1e-4), name
    kinds = {name.partition(".")[0] for name, _ in optimizers.state()}
    assert kinds == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}


def test_muon_on_a_torch_that_lacks_it_is_refused(rows, target, monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    recipe = recipe_of(rows, "training.optimizer=muon")
    draft = prepare(recipe, target=target, init_from=None, say=lambda line: None).draft
    with pytest.raises(ConfigError, match="muon needs torch"):
        Optimizers(draft, recipe.training)


def test_a_torn_state_is_passed_over(tmp_path, rows, target):
    recipe = recipe_of(rows, "training.save_every=2")
    run(recipe, tmp_path / "out", target)
    whole = last_state(tmp_path / "out")
    torn = saved_states(tmp_path / "out" / "state")[-1] / "state.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    _, watch = run(recipe, tmp_path / "out", target, resume=True)
    assert "skipped a torn state" in watch.text and "resumed at step 4 of 6" in watch.text
    assert same(last_state(tmp_path / "out"), whole)


def test_what_a_resume_refuses(tmp_path, rows, target):
    recipe = recipe_of(rows)
    run(recipe, tmp_path / "out", target)
    with pytest.raises(ConfigError, match=r"holds a run already; pass --resume"):
        run(recipe, tmp_path / "out", target)
    with pytest.raises(ConfigError, match=r"another training\.learning_rate: 0\.01, now 0\.02.*--init-from .*best$"):
        run(recipe_of(rows, "training.learning_rate=0.02"), tmp_path / "out", target, resume=True)
    other = write_rows(tmp_path / "other.jsonl", count=24, seed=1)
    with pytest.raises(ConfigError, match="another the rows"):
        run(recipe_of(other), tmp_path / "out", target, resume=True)
    result, watch = run(recipe_of(rows, "training.log_every=1"), tmp_path / "out", target, resume=True)
    assert result.steps == 6 and "resumed at step 6 of 6" in watch.text and not watch.steps


def gradient(job, groups, *, step=0):
    """The averaged gradient of a window with these micro-batches."""
    view, source = FrozenTarget(job.target), OnlineFeatures(job.target, dtype=torch.float32)
    module = LossModule(job.draft, job.objective, view, is_bf16=False, is_anchored=False)
    window = GradientWindow(Accelerator(cpu=True), module, draft=job.draft, source=source, clip_norm=0)
    sums = window.run([[job.examples.train[index] for index in group] for group in groups], step=step)
    return sums, {name: parameter.grad.clone() for name, parameter in job.draft.named_parameters()}


def test_accumulation_changes_no_gradient(rows, target):
    """Acceptance 21: six rows at once, 2 x 3, 3 + 1 + 2, one by one; lengths and masks are very unequal."""
    job = prepare(recipe_of(rows), target=target, say=lambda text: None)
    counts = [example.num_supervised for example in job.examples.train[:6]]
    assert max(counts) > 3 * min(counts)
    whole, expected = gradient(job, [range(6)])
    for groups in ([range(2), range(2, 4), range(4, 6)], [range(3), [3], [4, 5]], [[index] for index in range(6)]):
        sums, found = gradient(job, groups)
        assert sums.denominator == whole.denominator
        for name, tensor in expected.items():
            assert (found[name] - tensor).abs().max() <= 1e-6 * max(1.0, float(tensor.abs().max())), name


def test_steps_are_rounded_up_and_the_schedule_ends_with_the_run(tmp_path, target):
    rows = write_rows(tmp_path / "rows.jsonl", count=10, answer="a b c")
    recipe = recipe_of(
        rows, "training.epochs=2", "training.accumulation=2", "training.tokens_per_batch=60", "training.log_every=1",
        "data.validation=" + json.dumps([str(rows)]),
        text=RECIPE.replace("steps = 6\n", ""),
    )  # fmt: skip
    result, watch = run(recipe, tmp_path / "out", target)
    lines = [event for event in events(tmp_path / "out") if event["event"] == "train"]
    batches = int(watch.text.split(" batches,")[0].split()[-1])
    assert result.steps == len(lines) == 2 * -(-batches // 2)
    assert lines[-1]["learning_rate"] == pytest.approx(0.1 * 1e-2)


def test_rows_without_an_answer(tmp_path, target):
    """Acceptance 16."""
    rows = write_rows(tmp_path / "rows.jsonl", count=7, answer="a b c")
    long = {"messages": [{"role": "user", "content": "a " * 60 + "b"}, {"role": "assistant", "content": "c d"}]}
    with rows.open("a") as file:
        file.writelines(json.dumps(long) + "\n" for _ in range(3))
    result, watch = run(recipe_of(rows), tmp_path / "out", target)
    assert "3 dropped (3 x answer lost by truncation at 48 tokens)" in watch.text
    assert result.steps == 6
    assert all(event["loss"] > 0 for event in events(tmp_path / "out") if event["event"] == "train")
    rows.write_text(json.dumps(long) + "\n")
    with pytest.raises(DataError, match="no row is left to train on"):
        run(recipe_of(rows), tmp_path / "none", target)
    assert not (tmp_path / "none").exists()


def test_a_tiny_run_is_told_so_before_it_begins(tmp_path, target):
    """Acceptance 22."""
    rows = write_rows(tmp_path / "rows.jsonl", count=2)
    result, watch = run(recipe_of(rows, "training.warmup_steps=500"), tmp_path / "out", target)
    before = watch.text.split("train 2")[0]
    assert "run: 2 examples" in before and "supervised" in before and "run: 6 steps" in before
    assert "warm-up of 500 steps is not shorter than the run of 6" in before
    assert "the training rows themselves are used" in before
    assert result.best is not None and result.best < 1.05
    assert "the draft is not useful yet" in watch.said[-2]


def test_states_with_nan_stop_the_run_and_name_the_row(tmp_path, rows):
    target = random_target()
    token = target.tokenizer.convert_tokens_to_ids("rome")
    rows.write_text(rows.read_text() + json.dumps({"messages": [
        {"role": "user", "content": "rome"}, {"role": "assistant", "content": "a b c"},
    ]}) + "\n")  # fmt: skip
    lines = [number for number, line in enumerate(rows.read_text().splitlines(), start=1) if "rome" in line]
    with torch.no_grad():
        target.model.model.embed_tokens.weight[token] = torch.inf
    with pytest.raises(DataError, match="hold NaN or infinity; no weight was changed") as error:
        run(recipe_of(rows, "training.steps=20"), tmp_path / "out", target)
    assert any(f"rows.jsonl:{line} " in str(error.value) for line in lines)
    assert not (tmp_path / "out" / "last").exists()


class Wrapped:
    """An objective that changes what another returns."""

    def __init__(self, inner, change):
        self.inner, self.change = inner, change

    def loss(self, draft, batch, target, *, step):
        return self.change(self.inner.loss(draft, batch, target, step=step), draft)


def trainer_of(recipe, out, target, change=None, *, die_at=None):
    watch = Onlooker(die_at=die_at)
    job = prepare(recipe, target=target, say=watch.say)
    if change is not None:
        job = dataclasses.replace(job, objective=Wrapped(job.objective, change))
    accelerator = Accelerator(cpu=True)
    return Trainer(job, out=out, accelerator=accelerator, watch=watch, say=watch.say), watch


def test_a_gradient_that_is_not_finite_changes_no_weight(tmp_path, rows, target):
    def steep(terms, draft):
        return dataclasses.replace(terms, numerator=terms.numerator + (draft.fc.weight * 0).sum().sqrt())

    trainer, _ = trainer_of(recipe_of(rows), tmp_path / "out", target, steep)
    before = {name: tensor.clone() for name, tensor in trainer.draft.state_dict().items()}
    with pytest.raises(DataError, match=r"step 1: the gradient is nan in a window with the rows .*rows.jsonl:"):
        trainer.run()
    assert same(trainer.draft.state_dict(), before)


def test_an_objective_that_draws_from_torch_s_own_generator_resumes_too(tmp_path, rows, target):
    recipe = recipe_of(rows, "training.save_every=2")

    def noisy(terms, draft):
        return dataclasses.replace(terms, numerator=terms.numerator * torch.nn.functional.dropout(torch.ones(()), 0.5))

    trainer_of(recipe, tmp_path / "straight", target, noisy)[0].run()
    assert in_child(lambda: trainer_of(recipe, tmp_path / "killed", target, noisy, die_at=3)[0].run()) < 0
    trainer_of(recipe, tmp_path / "killed", target, noisy)[0].run(resume=True)
    assert same(last_state(tmp_path / "killed"), last_state(tmp_path / "straight"))


@pytest.mark.parametrize("arw", ["true", "false"])
def test_what_an_objective_has_learnt_of_its_batches_resumes_too(tmp_path, rows, target, arw):
    options = f"objective.options={{steps = 3, estimator = 'sampled', arw = {arw}}}"
    recipe = recipe_of(rows, "training.save_every=2", "objective.name=vsd", options)
    trainer_of(recipe, tmp_path / "straight", target)[0].run()
    assert in_child(lambda: trainer_of(recipe, tmp_path / "killed", target, die_at=3)[0].run()) < 0
    trainer_of(recipe, tmp_path / "killed", target)[0].run(resume=True)
    state = last_state(tmp_path / "straight")
    assert same(last_state(tmp_path / "killed"), state)
    assert bool(state["objective.own.0"].any()) == (arw == "true")


def test_a_window_without_a_supervised_token_is_told(tmp_path, rows, target):
    def nothing(terms, draft):
        zero = torch.zeros(())
        return LossTerms(zero, zero)

    trainer, watch = trainer_of(recipe_of(rows), tmp_path / "out", target, nothing)
    before = {name: tensor.clone() for name, tensor in trainer.draft.state_dict().items()}
    trainer.run()
    assert "2 steps had no supervised token and changed nothing" in watch.text
    assert same(trainer.draft.state_dict(), before)
    assert all(event["loss"] is None for event in events(tmp_path / "out") if event["event"] == "train")


def test_a_loss_of_exactly_zero_is_no_ordinary_line(tmp_path, rows, target):
    """K06: a mask that nobody noticed looks like perfect learning."""

    def zero(terms, draft):
        return dataclasses.replace(terms, numerator=terms.numerator * 0)

    trainer, watch = trainer_of(recipe_of(rows), tmp_path / "out", target, zero)
    trainer.run()
    assert "the loss is exactly 0 at step 2: nothing is learnt from it" in watch.text


def test_the_start_is_the_target_s_head_and_highest_tap(tmp_path, rows):
    """K09: a tied target; nothing that is saved is a fresh random start."""
    target = make_target(tiny_llama(layers=3, tie_word_embeddings=True), tokenizer=tiny_tokenizer())
    job = prepare(recipe_of(rows), target=target, say=lambda text: None)
    head = target.model.model.embed_tokens.weight
    assert torch.equal(job.draft.lm_head.weight, head[job.draft.vocab.ids])
    states = target.full_forward(job.examples.train[0].ids[None]).taps
    assert states is not None
    fused, highest = job.draft.fuse(states), states[..., 64:]
    assert torch.nn.functional.cosine_similarity(fused, highest, dim=-1).min() > 0.9
    assert 0.1 < float(fused.detach().square().mean().sqrt()) < 0.5  # whatever the size of the target's residual
    assert set(target.tokenizer.all_special_ids) <= set(job.draft.vocab.ids.tolist())
    other = prepare(recipe_of(rows, "draft.init=random"), target=target, say=lambda text: None)
    assert not torch.equal(other.draft.lm_head.weight, job.draft.lm_head.weight)
    assert torch.equal(other.draft.midlayer.mlp.up_proj.weight, job.draft.midlayer.mlp.up_proj.weight)  # by the seed
    run(recipe_of(rows, "training.steps=5"), tmp_path / "out", target)
    trained = load_draft(tmp_path / "out" / "last", target=target, warn=pytest.fail).draft
    for name, parameter in trained.named_parameters():
        assert not torch.equal(parameter, job.draft.state_dict()[name]), name
    assert torch.equal(head, tiny_llama(layers=3, tie_word_embeddings=True).model.embed_tokens.weight)


def test_the_vocabulary_follows_the_data_and_the_size(rows, target, tmp_path):
    small = prepare(recipe_of(rows, "draft.vocab_size=20"), target=target, say=lambda text: None).draft.vocab
    large = prepare(recipe_of(rows, "draft.vocab_size=30"), target=target, say=lambda text: None).draft.vocab
    full = prepare(recipe_of(rows, "draft.vocab_size=64"), target=target, say=lambda text: None).draft
    assert (small.size, large.size) == (20, 30)
    assert full.vocab.is_full and not {"d2t", "t2d"} & full.state_dict().keys()
    with pytest.raises(ConfigError, match=r"expected the size once, as draft\.vocab_size"):
        prepare(recipe_of(rows, "draft.options={draft_vocab_size=9}"), target=target, say=lambda text: None)
    with pytest.raises(ConfigError, match="has no weights"):
        prepare(recipe_of(rows, "draft.name=ngram", "draft.options={}"), target=target, say=lambda text: None)


def test_init_from_a_draft(tmp_path, rows, target):
    first, _ = run(recipe_of(rows), tmp_path / "one", target)
    job = prepare(recipe_of(rows), target=target, init_from=tmp_path / "one" / "last", say=lambda text: None)
    assert same(job.draft.state_dict(), load_draft(tmp_path / "one" / "last").draft.state_dict())
    with pytest.raises(ConfigError, match="another draft than the recipe's: draft_vocab_size 40 instead of 30"):
        prepare(recipe_of(rows, "draft.vocab_size=30"), target=target, init_from=tmp_path / "one" / "last")
    assert first.steps == 6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dtypes_of_a_bf16_target(tmp_path, rows, precision):
    target = make_target(tiny_llama(layers=3).bfloat16(), tokenizer=tiny_tokenizer())
    recipe = recipe_of(rows, f"training.precision={precision}", "target.dtype=bfloat16", "training.save_dtype=bfloat16")
    result, _ = run(recipe, tmp_path / "out", target)
    state = last_state(tmp_path / "out")
    assert {tensor.dtype for name, tensor in state.items() if name.endswith("weight")} == {torch.float32}
    assert load_draft(tmp_path / "out" / "last", dtype=torch.bfloat16).draft.fc.weight.dtype == torch.bfloat16
    assert result.steps == 6


def in_world(work, *, size):
    """Run `work(rank)` in that many processes that find each other through gloo; their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port), ACCELERATE_USE_CPU="true", LOCAL_WORLD_SIZE=str(size),
            )  # fmt: skip
            AcceleratorState._reset_state(True)
            signal.alarm(60)
            os._exit(0 if in_child(functools.partial(work, rank)) == 0 else 1)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_two_processes_train_as_one_with_twice_the_accumulation(tmp_path, rows, target):
    """The last window of an epoch gives one process fewer micro-batches than the other."""
    changes = ("training.steps=5", "training.save_every=5", "training.log_every=1", "training.tokens_per_batch=72")

    def work(rank):
        run(recipe_of(rows, *changes, "training.accumulation=2"), tmp_path / "two", target)

    assert in_world(work, size=2) == [0, 0]
    _, watch = run(recipe_of(rows, *changes, "training.accumulation=4"), tmp_path / "one", target)
    assert int(watch.text.split(" batches,")[0].split()[-1]) % 4 in (1, 3)
    one, two = last_state(tmp_path / "one"), last_state(tmp_path / "two")
    for name in one:
        if name.startswith(("draft.", "exp_avg.")):
            assert torch.allclose(one[name].float(), two[name].float(), atol=1e-5), name
    numbers = [
        [
            event[key]
            for event in events(tmp_path / name)
            for key in ("loss", "gradient_norm", "accuracy_0", "accepted_length", "padding")
            if key in event
        ]
        for name in ("one", "two")
    ]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_process_with_only_empty_masks_does_not_hang_the_others(tmp_path, rows, target, is_connected):
    """K39: rank 1 never has a supervised token; its loss reaches no weight, or one of them with zero."""

    def work(rank):
        def one_sided(terms, draft):
            nothing = (draft.fc.weight * 0).sum() if is_connected else torch.zeros(())
            return terms if rank == 0 else LossTerms(nothing, torch.zeros(()))

        trainer, _ = trainer_of(recipe_of(rows, "training.steps=3"), tmp_path / "out", target, one_sided)
        before = trainer.draft.fc.weight.clone()
        trainer.run()
        assert not torch.equal(trainer.draft.fc.weight, before)

    assert in_world(work, size=2) == [0, 0]
