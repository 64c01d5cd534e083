"""One record, two sources, equal batches: online and captured states are the same, bit for bit in float32."""

import pytest
import torch

from fixtures_models import make_target, tiny_llama
from fixtures_text import tiny_tokenizer
from fixtures_training import Onlooker, last_state, random_target, recipe_of, write_rows
from paceline.errors import CheckpointError, ConfigError, DataError
from paceline.store.features import FeatureReader, FeatureWriter
from paceline.store.figures import size_text
from paceline.training.capture import capture
from paceline.training.capture_run import plan_capture, run_capture
from paceline.training.prepare import prepare
from paceline.training.sources import CapturedFeatures, FrozenTarget, OnlineFeatures, target_states
from paceline.training.trainer import train


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", count=20)


def captured(rows, folder, target, *, dtype="float32"):
    plan = plan_capture(recipe_of(rows), dtype=dtype, say=lambda text: None, target=target)
    return plan, run_capture(plan, folder=folder, max_disk=None, say=print)


def test_online_and_captured_batches_are_equal_bit_for_bit(tmp_path, rows, target):
    plan, done = captured(rows, tmp_path / "features", target)
    assert (done.done, done.total, done.is_full) == (20, 20, False)
    online = OnlineFeatures(target, dtype=torch.float32)
    stored = CapturedFeatures(FeatureReader(tmp_path / "features"), dtype=torch.float32, device=torch.device("cpu"))
    for start in (0, 5, 11):
        examples = plan.examples[start : start + 5]
        one, two = online.batch(examples), stored.batch(examples)
        for name in ("ids", "mask", "lengths", "taps", "hidden"):
            assert torch.equal(getattr(one, name), getattr(two, name)), name
        assert one.ids.shape[1] == max(len(example.ids) for example in examples)
        behind = torch.arange(one.ids.shape[1])[None] >= one.lengths[:, None]
        assert not one.taps[behind].any() and not one.hidden[behind].any() and not one.mask[behind].any()


def test_the_states_are_the_layers_outputs(rows, target):
    """K03: taps are hidden_states[i + 1] of transformers, the last hidden state is after the final norm."""
    job = prepare(recipe_of(rows), target=target, say=lambda text: None)
    example = job.examples.train[0]
    ((taps, hidden),) = target_states(target, [example])
    with torch.no_grad():
        out = target.model.model(example.ids[None], output_hidden_states=True)
    expected = torch.cat([out.hidden_states[tap + 1][0] for tap in job.draft.taps[:-1]], dim=-1)
    assert torch.equal(taps[:, : expected.shape[1]], expected)
    assert torch.equal(hidden, out.last_hidden_state[0])


def test_training_is_the_same_from_both_sources(tmp_path, rows, target):
    captured(rows, tmp_path / "features", target)
    for name, changes in (("online", ()), ("captured", (f"data.features={tmp_path / 'features'}",))):
        train(recipe_of(rows, *changes), out=tmp_path / name, watch=Onlooker(), target=target)
    one, two = last_state(tmp_path / "online"), last_state(tmp_path / "captured")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_bf16_features_train(tmp_path, rows, target):
    captured(rows, tmp_path / "features", target, dtype="bfloat16")
    recipe = recipe_of(rows, f"data.features={tmp_path / 'features'}")
    result = train(recipe, out=tmp_path / "out", watch=Onlooker(), target=target)
    assert result.steps == 6
    reader = FeatureReader(tmp_path / "features")
    examples = prepare(recipe, target=target, say=lambda text: None).examples.train[:3]
    batch = CapturedFeatures(reader, dtype=torch.float32, device=torch.device("cpu")).batch(examples)
    assert (batch.taps.dtype, batch.hidden.dtype) == (torch.float32, torch.bfloat16)
    assert FrozenTarget(target).head(batch.hidden).dtype == torch.float32


@pytest.mark.parametrize("kind", ["target", "template", "dtype"])
def test_features_of_another_origin_are_refused(tmp_path, rows, kind):
    captured(rows, tmp_path / "features", random_target())
    model = tiny_llama(layers=3, seed=1 if kind == "target" else 0)
    other = make_target(model.bfloat16() if kind == "dtype" else model, tokenizer=tiny_tokenizer())
    changes = [f"data.features={tmp_path / 'features'}"]
    if kind == "template":
        changes.append("data.template_options={enable_thinking=true}")
    with pytest.raises(
        CheckpointError, match="is of another origin: " + ("template" if kind == "template" else "target")
    ):
        train(recipe_of(rows, *changes), out=tmp_path / "out", watch=Onlooker(), target=other)
    assert not (tmp_path / "out").exists()


def test_rows_that_were_not_captured_are_refused_before_the_run(tmp_path, rows, target):
    captured(rows, tmp_path / "features", target)
    more = write_rows(tmp_path / "more.jsonl", count=21, seed=5)
    recipe = recipe_of(more, f"data.features={tmp_path / 'features'}")
    with pytest.raises(DataError, match=r"no features for 21 of 21 examples, first .*more\.jsonl:1"):
        train(recipe, out=tmp_path / "out", watch=Onlooker(), target=target)


def test_a_cap_on_the_disk_stops_cleanly_and_goes_on(tmp_path, rows, target):
    said = []
    plan = plan_capture(recipe_of(rows), dtype="float32", say=said.append, target=target)
    assert f"= {size_text(plan.num_bytes)}, " in said[-1]
    folder = tmp_path / "features"
    first = run_capture(plan, folder=folder, max_disk=plan.num_bytes // 2, say=print)
    assert first.is_full and 0 < first.done < first.total
    assert sum(path.stat().st_size for path in folder.iterdir()) <= plan.num_bytes // 2
    assert not list(folder.glob(".*"))
    second = run_capture(plan, folder=folder, max_disk=None, say=print)
    assert (second.done, second.is_full) == (second.total, False)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= plan.num_bytes
    again = run_capture(plan, folder=folder, max_disk=None, say=print)
    assert (again.done, again.new_tokens) == (again.total, 0)


def test_a_state_that_is_not_finite_names_its_row(tmp_path, rows):
    target = random_target()
    with torch.no_grad():
        target.model.model.norm.weight[3] = torch.nan
    plan = plan_capture(recipe_of(rows), dtype="float32", say=lambda text: None, target=target)
    with (
        FeatureWriter(tmp_path / "features", fingerprint=plan.fingerprint) as writer,
        pytest.raises(DataError, match=r"rows\.jsonl:\d+: row .* NaN or infinity"),
    ):
        capture(target, plan.examples, writer=writer)


def test_an_unknown_dtype_is_refused(rows, target):
    with pytest.raises(ConfigError, match="float16"):
        plan_capture(recipe_of(rows), dtype="float16", say=lambda text: None, target=target)


def test_prompts_are_trained_on_when_asked_with_the_states_that_lie_there(tmp_path, rows, target):
    """`data.supervise = "all"`: more tokens of the same rows, no second capture; validation stays with the answers."""
    captured(rows, tmp_path / "features", target)
    changes = (f"data.features={tmp_path / 'features'}", "data.supervise=all")
    jobs = [prepare(recipe_of(rows, *some), target=target, say=lambda text: None) for some in ((), changes)]
    answers, everything = (job.lessons() for job in jobs)
    assert [example.digest for example in answers] == [example.digest for example in everything]
    assert all(example.num_supervised == len(example.ids) for example in everything)
    assert not any(example.mask.all() for example in answers)
    for example, other in zip(jobs[0].examples.validation, jobs[1].examples.validation, strict=True):
        assert torch.equal(example.mask, other.mask)
    onlooker = Onlooker()
    train(recipe_of(rows, *changes), out=tmp_path / "out", watch=onlooker, target=target)
    total = sum(len(example.ids) for example in everything)
    assert f"{total} tokens per epoch, {total} of them supervised" in onlooker.text
    with pytest.raises(ConfigError, match=r"data\.supervise"):
        train(recipe_of(rows, changes[0]), out=tmp_path / "out", watch=Onlooker(), target=target, resume=True)
