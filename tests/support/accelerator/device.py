"""The pretended accelerator as a place to run steps in."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AttentionInterface, PreTrainedModel

from tests.support.accelerator.dispatch import Dispatch, Numbers, register, to_list
from tests.support.accelerator.driver import Driver
from tests.support.accelerator.events import Log
from tests.support.accelerator.launcher import CountingLauncher
from workers.model import hook, model
from workers.model.mixers import Mixers

preflight = model.preflight


class Accelerator:
    """One fake device. `log` holds all requests since the last `take`."""

    def __init__(self) -> None:
        register()
        self.log = Log()
        self.driver = Driver(self.log)
        self.launcher = CountingLauncher(self.log)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """This thread's torch has the device meanwhile."""
        with ExitStack() as stack:
            stack.enter_context(self.driver.patched())
            stack.enter_context(patch.object(FakeTensor, "tolist", to_list))
            # modules that are moved to where they are would change each FakeTensor for itself, which torch cannot
            stack.enter_context(patch.object(torch.utils, "swap_tensors", lambda *_: None))
            stack.enter_context(patch.object(model, "preflight", _preflight_without_numbers))
            stack.enter_context(self._labelled_layers())
            stack.enter_context(Numbers())
            stack.enter_context(Dispatch(self.log, self._fake))
            yield

    @contextmanager
    def _labelled_layers(self) -> Generator[None, None, None]:
        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            with self.log.within(module.layer_idx):  # pyright: ignore[reportArgumentType]
                return hook.attention(module, *args, **kwargs)

        with patch.object(hook, "register", lambda: AttentionInterface.register(hook.NAME, attention)):
            hook.register()
            yield
        hook.register()


def _preflight_without_numbers(
    module: PreTrainedModel, device: str, mixers: Mixers | None = None, *, has_weights: bool = True
) -> Any:
    """The device has no numbers, so checks that compare rows are impossible there."""
    return preflight(module, device, mixers, has_weights=False)
