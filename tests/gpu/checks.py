"""All checks, the quick ones first."""

from collections.abc import Callable

from tests.gpu import attention, decoding, drafts, flash, moving, sampling, steps, waiting
from tests.gpu.place import Place

CHECKS: tuple[Callable[[Place], None], ...] = (
    moving.probes,
    attention.few_rows,
    attention.latents,
    attention.keys_in_8_bits,
    attention.blocks_are_attributed,
    attention.many_rows,
    attention.many_rows_by_flash_kernels,
    flash.cudnn_is_right,
    flash.flash_attn_4_is_right,
    flash.regular_shapes_agree_with_float64,
    flash.torchs_own_is_right,
    flash.torchs_public_one_is_right,
    flash.flash_attn_is_right,
    flash.chunks_of_every_dim,
    flash.chunks_have_the_same_bits_each_time,
    moving.tokens_where_they_belong,
    moving.same_8_bits_as_the_cpu,
    moving.packed_bits,
    moving.folds_to_the_same_bits,
    moving.attends_to_the_same_bits,
    waiting.no_call_waits,
    waiting.a_graph_serves_any_mix,
    sampling.tokens_of_the_cpu,
    sampling.tokens_of_the_operations_of_fixed_shape,
    steps.a_model_answers_as_on_the_cpu,
    decoding.captured_steps_have_the_bits_of_eager_ones,
    decoding.steps_one_behind_say_the_same,
    decoding.steady_steps_do_not_synchronize,
    drafts.drafts_change_no_token,
    decoding.ranks_that_share_a_device_say_what_one_does,
    attention.every_type_and_dim,
    attention.far_slots,
)
