"""Runs prefill steps: each rank computes a piece of a chunk and stores its keys."""

import msgspec

from longleaf.rank_protocol.step import Prefill, StepResult
from workers.host_copies import AsyncHostCopy
from workers.rank_runtime import StepHandle
from workers.step.forward import ModelRunner, Peers
from workers.step.inputs import InputBuilder


class PrefillRunner:
    """Runs the prefill steps of one epoch."""

    def __init__(self, inputs: InputBuilder, model_runner: ModelRunner, peers: Peers) -> None:
        self._inputs = inputs
        self._model_runner = model_runner
        self._peers = peers

    def start(self, work: Prefill, result: StepResult) -> StepHandle:
        """Begins a step. The result reports that the keys are stored, and after how many seconds: on a GPU a chunk has
        only been launched by the time this method returns.
        """
        finite_copy = AsyncHostCopy(self._model_runner.store_chunk(self._inputs.prefill(work)))
        result = msgspec.structs.replace(result, merge_bytes=self._peers.pop_merge_bytes())
        is_first = self._peers.rank == 0

        def finish() -> StepResult | None:
            has_finite_keys = bool(finite_copy.wait())
            return msgspec.structs.replace(result, has_finite_keys=has_finite_keys) if is_first else None

        return StepHandle(lambda: finite_copy.arrival.is_past, finish)
