"""The families whose forward passes can be captured in a graph, and the host synchronization of the others.

Only experts synchronize with the host: by default transformers multiplies the rows of all experts in one grouped
product, and torch has a kernel for it only in bfloat16. With other dtypes the host waits for the number of rows per
expert. The config setting "batched_mm" never synchronizes, but copies the weights of an expert for each of its rows;
"eager" always synchronizes. In Llama 4 all rows pass through all experts.
"""

import pytest
import torch
from transformers.utils import import_utils

from tests.support.fakes.cuda_graphs import RecordedGraphs
from workers.cuda_graphs.graphs import CaptureRefused
from workers.model import model as models
from zoo.checkpoints import make_checkpoint
from zoo.families import FAMILIES

ROWS, VOCABULARY = 4, 512
GROUPED = (
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v2",
    "glm4_moe_lite",
    "mistral4",
    "axk1",
    "kimi_k25",
    "minimax_m2",
    "glm4_moe",
    "hy_v3",
    "laguna",
    "kolibri1",
    "ernie4_5_moe",
    "mimo_v2_flash",
)
"""Families whose experts are multiplied in grouped products."""
LOOPING = ("longcat_flash",)
"""Families whose experts are called one by one: some of them compute nothing."""
QUICK = ("llama", "gemma3", "gemma3_images", "llama4", "gpt2", "gpt_oss", "deepseek_v3")
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Creates the checkpoint of a family once."""
    made = {}

    def get(family):
        if family not in made:
            num_layers = 4 if family.startswith("llama4") else 2  # the smallest number with all kinds
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family, num_layers=num_layers)
        return made[family]

    return get


@pytest.fixture
def simulated_capture(monkeypatch):
    """During a capture transformers skips checks that only warn and would read ids; on a GPU it detects the capture
    itself."""
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)


class OwnValueHandle:
    """Each row attends only to its own values, scaled by its rotated query."""

    def attend(self, layer, q_THD, k_KTD, v_KTV, call):
        (num_tokens, num_heads, _), num_kv_heads = q_THD.shape, v_KTV.shape[0]
        v_TKGV = v_KTV.transpose(0, 1)[:, :, None].expand(-1, -1, num_heads // num_kv_heads, -1)
        return v_TKGV.reshape(num_tokens, num_heads, -1) * q_THD.sum(-1, keepdim=True).tanh()


class Forward:
    """A forward pass over tensors of fixed address."""

    def __init__(self, folder, dtype, experts=None):
        self.model = models.load(str(folder), dtype, "cpu")
        if experts is not None:
            self.model.module.set_experts_implementation(experts)
        self.ids, self.positions = torch.zeros(ROWS, dtype=torch.long), torch.zeros(ROWS, dtype=torch.long)
        self.logits = torch.zeros(ROWS, VOCABULARY, dtype=self.model.dtype)
        self.sampled = torch.arange(ROWS)
        self.fill(0)

    def fill(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids.copy_(torch.randint(VOCABULARY, (ROWS,), generator=generator))
        self.positions.copy_(torch.randint(1000, (ROWS,), generator=generator))

    @torch.inference_mode()
    def run(self):
        inputs = self.model.arguments(OwnValueHandle().attend, self.ids, self.positions)
        found = self.model.module(**inputs, return_dict=False, logits_to_keep=self.sampled)
        self.logits.copy_(found[0][0])


def check_replays(forward):
    """A captured forward pass, replayed for other rows, gives the result of a fresh run."""
    replay = RecordedGraphs().capture(forward.run)
    seen = []
    for seed in (1, 2):
        forward.fill(seed)
        replay()
        seen.append(forward.logits.clone())
        forward.run()
        assert torch.equal(seen[-1], forward.logits)
        assert forward.logits.isfinite().all()
    assert not torch.equal(*seen)


def thinned(rows):
    return [row if row[0] in QUICK else pytest.param(*row, marks=pytest.mark.slow) for row in rows]


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("simulated_capture")
@pytest.mark.parametrize(("family", "dtype"), thinned((family, dtype) for family in FAMILIES for dtype in DTYPES))
def test_forward_pass_can_be_captured(folder_of, family, dtype):
    forward = Forward(folder_of(family), dtype)
    if family in GROUPED and dtype != "bfloat16":
        with pytest.raises(CaptureRefused, match="_grouped_mm at transformers.integrations.moe:[0-9]+: .* offsets"):
            RecordedGraphs().capture(forward.run)
    elif family in LOOPING:
        with pytest.raises(CaptureRefused, match=f"transformers.models.{family}.*: the host waits for numbers"):
            RecordedGraphs().capture(forward.run)
    else:
        check_replays(forward)


@pytest.mark.parametrize(("family", "dtype"), thinned((family, dtype) for family in GROUPED for dtype in DTYPES))
def test_experts_can_be_captured_with_other_settings(folder_of, family, dtype):
    check_replays(Forward(folder_of(family), dtype, experts="batched_mm"))
    with pytest.raises(CaptureRefused, match="transformers.models.*: the host waits for numbers"):
        RecordedGraphs().capture(Forward(folder_of(family), dtype, experts="eager").run)


def test_model_that_reads_ids_on_the_host_is_refused(folder_of):
    """transformers does not detect the capture here."""
    with pytest.raises(CaptureRefused, match="lift_fresh at transformers.modeling_utils"):
        RecordedGraphs().capture(Forward(folder_of("gpt2"), "float32").run)
