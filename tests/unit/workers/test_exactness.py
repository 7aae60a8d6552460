"""A rank compares each checkpoint with plain attention once, before it serves the model."""

import dataclasses

import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from longleaf.config import EngineConfig
from longleaf.errors import ModelRefused
from longleaf.fingerprint import read_fingerprint
from longleaf.kernels import registry
from tests.support.threads import config_for, make_spec
from workers import exactness, rank
from workers.exactness import ExactnessRecords, check_exact, record_key, verify_model
from workers.model import hook, mixers, model
from workers.model.hook import LayerCall
from workers.rank import Rank
from workers.runners import verification
from zoo.checkpoints import PAD_IDS, make_checkpoint
from zoo.families import FAMILIES, HYBRIDS

CONFIG = EngineConfig(model="")
DTYPES = ("float32", "bfloat16", "float16")


def check(folder, dtype="float32"):
    loaded = model.load(str(folder), dtype, "cpu")
    return check_exact(loaded, registry.choose("auto", "cpu", loaded.dtype), CONFIG)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("pad_token_id", PAD_IDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_every_supported_family_agrees(tmp_path, family, dtype, pad_token_id):
    note = check(make_checkpoint(tmp_path, family, pad_token_id=pad_token_id), dtype)
    if family == "nemotron_h" and dtype != "float32":  # the module of transformers mixes types
        assert note.startswith("not verified: plain attention failed: RuntimeError: expected m1 and m2")
    else:
        assert note == ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("family", ["falcon_h1", "zaya"])
def test_stateful_model_that_passes_the_preflight_is_refused(tmp_path, monkeypatch, family, dtype):
    monkeypatch.setattr(model, "WITH_STATES", {})
    monkeypatch.setattr(mixers, "CACHE_METHODS", ())
    monkeypatch.setattr(model.Probe, "_check_rows", lambda *_: None)
    folder = make_checkpoint(tmp_path, family, num_layers=2, pad_token_id=0)
    with pytest.raises(ModelRefused, match=f"{compared_dtype(dtype)} differ from those of transformers by up to"):
        check(folder, dtype)


def compared_dtype(dtype):
    """The dtype in the error: bfloat16 models are compared in float32."""
    return "its logits in float32" if dtype == "bfloat16" else f"its logits in {dtype}"


def with_large_scores(call):
    """Attention with scores that are too large."""
    return call._replace(scale=1.02 * call.scale)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [("llama", with_large_scores), ("gemma2", lambda call: call._replace(softcap=None))],
    ids=["scale", "cap"],
)
def test_wrong_attention_is_refused_for_every_class(tmp_path, monkeypatch, family, wrong):
    folder = make_checkpoint(tmp_path, family)
    assert check(folder) == ""
    monkeypatch.setattr(hook, "LayerCall", lambda *values: wrong(LayerCall(*values)))
    with pytest.raises(ModelRefused, match="is not exact here"):
        check(folder)


def test_rows_that_interact_only_in_long_steps_are_refused(tmp_path, monkeypatch):
    """Experts of limited capacity do so; the preflight has too few rows to detect it."""
    own = LlamaRMSNorm.forward

    def shifted(self, hidden):
        found = own(self, hidden)
        return found + found.roll(1, dims=1) if hidden.shape[1] > 16 else found

    monkeypatch.setattr(LlamaRMSNorm, "forward", shifted)
    with pytest.raises(ModelRefused, match="is not exact here"):
        check(make_checkpoint(tmp_path, "llama"))


def test_model_with_few_positions_is_compared_within_them(tmp_path):
    assert check(make_checkpoint(tmp_path, "gpt2", max_positions=20)) == ""


def test_model_that_cannot_be_compared_is_not_verified(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no eager attention")

    folder = make_checkpoint(tmp_path, "llama", num_layers=1)
    monkeypatch.setattr(verification, "plain_logits", fail)
    for dtype in ("float32", "bfloat16"):
        note = check(folder, dtype)
        assert note == "not verified: plain attention failed: RuntimeError: no eager attention"


def test_logits_that_are_not_finite_are_not_verified(tmp_path):
    loaded = model.load(str(make_checkpoint(tmp_path, "llama", num_layers=1)), "float32", "cpu")
    loaded.module.lm_head.weight.fill_(torch.inf)
    note = check_exact(loaded, registry.choose("auto", "cpu", torch.float32), CONFIG)
    assert note == "not verified: its keys or logits for random tokens are not finite"


def test_model_that_cannot_run_its_steps_is_refused(tmp_path, monkeypatch):
    loaded = model.load(str(make_checkpoint(tmp_path, "llama", num_layers=1)), "float32", "cpu")
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ModelRefused, match="LlamaForCausalLM cannot run on such steps: division by zero"):
        check_exact(loaded, registry.choose("auto", "cpu", torch.float32), CONFIG)


@pytest.fixture
def compared(monkeypatch):
    """The list of compared models; the comparison itself is replaced."""
    made = []
    monkeypatch.setattr(exactness, "check_exact", lambda *arguments: made.append(arguments) or "")
    return made


def first_rank(folder, records, **settings):
    spec = replace(make_spec(0, config_for(folder, **settings)), is_first_here=True)
    return Rank(spec, records=records)


def test_checkpoint_is_compared_once_per_dtype(tmp_path, compared):
    folder, records = (
        make_checkpoint(tmp_path / "model", "llama", num_layers=1),
        ExactnessRecords(tmp_path / "cache" / "exact"),
    )
    for dtype, num_compared in (("float32", 1), ("float32", 1), ("bfloat16", 2), ("float32", 2)):
        made = first_rank(folder, records, dtype=dtype)
        made.make_hello()
        made.load()
        assert len(compared) == num_compared
    make_checkpoint(folder, "llama", num_layers=1, seed=1)
    made = first_rank(folder, records)
    made.make_hello()
    made.load()
    assert len(compared) == 3


def test_record_depends_on_versions_and_kernels(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, "llama", num_layers=1)
    loaded, fingerprint = model.load(str(folder), "float32", "cpu"), read_fingerprint(folder)
    backends = [registry.choose(name, "cpu", torch.float32) for name in ("torch", "dense")]
    keys = {record_key(fingerprint, loaded, backend) for backend in backends}
    keys.add(record_key(fingerprint, dataclasses.replace(loaded, dtype=torch.bfloat16), backends[0]))
    monkeypatch.setattr(exactness, "version", lambda package: "0.0")
    keys.add(record_key(fingerprint, loaded, backends[0]))
    assert len(keys) == 4


@pytest.mark.parametrize("outcome", ["refused", "not verified"])
def test_inexact_result_is_not_recorded(tmp_path, monkeypatch, outcome):
    folder, records = make_checkpoint(tmp_path / "model", "llama", num_layers=1), ExactnessRecords(tmp_path / "exact")
    loaded, backend = model.load(str(folder), "float32", "cpu"), registry.choose("auto", "cpu", torch.float32)

    def found(*_):
        if outcome == "refused":
            raise ModelRefused(outcome)
        return outcome

    monkeypatch.setattr(exactness, "check_exact", found)
    for _ in range(2):
        if outcome == "refused":
            with pytest.raises(ModelRefused, match=outcome):
                verify_model(loaded, backend, CONFIG, read_fingerprint(folder), records)
        else:
            assert verify_model(loaded, backend, CONFIG, read_fingerprint(folder), records) == outcome
    assert not (tmp_path / "exact").exists()


@pytest.mark.parametrize(("family", "reason"), [("nemotron_h", "another formula"), ("lfm2", "")])
def test_layers_with_two_formulas_are_not_reported_as_exact(tmp_path, family, reason):
    """Neither after the comparison, nor when it is recorded."""
    folder, records = make_checkpoint(tmp_path / "model", family), ExactnessRecords(tmp_path / "exact")
    loaded, backend = model.load(str(folder), "float32", "cpu"), registry.choose("auto", "cpu", torch.float32)
    for _ in range(2):
        note = verify_model(loaded, backend, CONFIG, read_fingerprint(folder), records)
        assert reason in note
        assert bool(note) == bool(reason)
    assert len(list((tmp_path / "exact").iterdir())) == 1


def test_unwritable_record_folder_is_not_an_error(tmp_path, compared):
    (tmp_path / "file").touch()
    folder, records = (
        make_checkpoint(tmp_path / "model", "llama", num_layers=1),
        ExactnessRecords(tmp_path / "file" / "exact"),
    )
    for num_compared in (1, 2):
        made = first_rank(folder, records)
        made.make_hello()
        made.load()
        assert len(compared) == num_compared


@pytest.mark.parametrize(
    ("member", "is_first_here", "verify_model", "is_compared"),
    [
        (0, True, True, True),
        (1, True, True, True),
        (1, False, True, False),
        (2, True, True, False),
        (0, True, False, False),
    ],
    ids=["first", "of another machine", "beside the first", "replacement", "switched off"],
)
def test_one_rank_per_machine_compares_at_the_start(
    tmp_path, monkeypatch, member, is_first_here, verify_model, is_compared
):
    monkeypatch.setattr(rank, "verify_model", lambda *_: "not verified: here")
    folder = make_checkpoint(tmp_path, "llama", num_layers=1)
    spec = make_spec(member, config_for(folder, world_size=2, verify_model=verify_model))
    made = Rank(replace(spec, is_first_here=is_first_here))
    made.load()
    assert made.connect(None).exactness_note == ("not verified: here" if is_compared else "")
