"""A run's state: bit for bit what was saved, the last two kept, torn ones passed over with a message."""

import signal

import pytest
import torch

from fixtures_kill import die_at_flush, die_at_rename, in_child
from paceline.errors import CheckpointError
from paceline.store.training_state import TrainingState, latest_state, saved_states, write_state


def state_at(step):
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "draft.fc.weight": torch.randn(3, 4, generator=generator),
        "exp_avg.fc.weight": torch.randn(3, 4, generator=generator).bfloat16(),
        "rng.torch": generator.get_state(),
    }
    return TrainingState(step, tensors, {"best": 1.0 / 3, "rows": [1, 2], "name": "x"})


def test_a_state_comes_back_bit_for_bit(tmp_path):
    state = state_at(5)
    write_state(tmp_path, state)
    found = latest_state(tmp_path, say=pytest.fail)
    assert found is not None
    assert (found.step, found.values) == (5, state.values)
    assert found.tensors.keys() == state.tensors.keys()
    for name, tensor in state.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_the_last_two_are_kept(tmp_path):
    for step in (3, 20, 100):
        write_state(tmp_path, state_at(step))
    assert [path.name for path in saved_states(tmp_path)] == ["step-00000020", "step-00000100"]


def test_nothing_was_saved(tmp_path):
    assert latest_state(tmp_path / "absent", say=pytest.fail) is None


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
@pytest.mark.parametrize("kind", ["cut", "flip", "gone"])
def test_a_torn_state_is_skipped_with_a_message(tmp_path, name, kind):
    for step in (1, 2):
        write_state(tmp_path, state_at(step))
    path = tmp_path / "step-00000002" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if kind == "cut" else data)
    said = []
    found = latest_state(tmp_path, say=said.append)
    assert found is not None and found.step == 1
    assert len(said) == 1 and "skipped a torn state" in said[0] and name in said[0]


def test_all_torn_is_an_error_and_never_a_fresh_start(tmp_path):
    write_state(tmp_path, state_at(1))
    (tmp_path / "step-00000001" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no whole state among 1"):
        latest_state(tmp_path, say=lambda text: None)


@pytest.mark.parametrize("die", [lambda n=n: die_at_flush(n) for n in (1, 3, 5, 6, 7)] + [lambda: die_at_rename(1)])
def test_a_kill_inside_a_save_leaves_the_state_before_or_after(tmp_path, die):
    write_state(tmp_path, state_at(1))

    def save_and_die():
        die()
        write_state(tmp_path, state_at(2))

    assert in_child(save_and_die) == -signal.SIGKILL
    found = latest_state(tmp_path, say=pytest.fail)
    assert found is not None and found.step in (1, 2)
    write_state(tmp_path, state_at(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
