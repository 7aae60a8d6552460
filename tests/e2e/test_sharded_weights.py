"""Sharded and whole weights in services with all other settings that ranks or contexts depend on.

The full product has 512 services, so the settings are a pairwise cover: every two values of two settings occur
together. All answers equal those of transformers' `generate` for the same ids, before and after a restart.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from coordinator.text.template import DirectRenderer
from coordinator.text.tokenizer import Tokenizer
from longleaf.client import Client
from longleaf.config import embedded_model
from longleaf.demo.haystack import Haystack, make_haystack
from longleaf.types import Delta, Finished, Recovering
from tests.support.authority import Authority
from tests.support.command_line import Served
from tests.support.conversations import question_ids
from tests.support.pairwise import pairwise_cover
from tests.support.service import encoded
from tests.support.tenants import ACME, BOLT, credential_of, write_credentials

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]
NUM_TOKENS = 24
SETTINGS = {
    "weights": ("whole", "sharded"),
    "window_keys": ("sharded", "replicated"),
    "kv_dtype": ("auto", "int8"),
    "has_tls": (False, True),
    "has_tenants": (False, True),
    "restart": ("none", "same", "ranks", "weights"),
    "world_size": (2, 3),
    "drafts": (0, 7),
}


class Case(NamedTuple):
    """Settings of a service, and those that differ after its restart."""

    weights: str
    window_keys: str
    kv_dtype: str
    has_tls: bool
    has_tenants: bool
    restart: str
    """`ranks` and `weights` name the setting that changes; `none`: no restart."""
    world_size: int
    drafts: int

    @property
    def options(self) -> tuple[str, ...]:
        """Those of `longleaf serve` that may change."""
        return "--weights", self.weights, "--world-size", str(self.world_size), "--max-draft-tokens", str(self.drafts)

    @property
    def fixed_options(self) -> tuple[str, ...]:
        return "--window-keys", self.window_keys, "--kv-dtype", self.kv_dtype

    def restarted(self) -> "Case":
        """The settings after the restart."""
        match self.restart:
            case "ranks":
                return self._replace(world_size=5 - self.world_size)
            case "weights":
                return self._replace(weights="sharded" if self.weights == "whole" else "whole")
        return self


COVER = [Case(*row) for row in pairwise_cover(list(SETTINGS.values()))]


class Documents:
    """A document and a question for each tenant, and the tokens that `generate` answers."""

    def __init__(self) -> None:
        self.texts: dict[str, Haystack] = {
            tenant: make_haystack(seed, 3000, 2, 0, split="held_out") for seed, tenant in ((5, ACME), (6, BOLT))
        }
        tokenizer = Tokenizer.load(embedded_model(), DirectRenderer())
        model = AutoModelForCausalLM.from_pretrained(embedded_model())
        self.expected = {tenant: self._generate(tokenizer, model, each) for tenant, each in self.texts.items()}

    @staticmethod
    def _generate(tokenizer: Tokenizer, model: Any, text: Haystack) -> list[int]:
        document = encoded(tokenizer.document_encoder(is_first=True), text.text)
        prompt = torch.tensor([[*document, *question_ids(tokenizer, [("user", text.facts[0].question)])]])
        options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None, "pad_token_id": 260}
        return model.generate(prompt, **options)[0, prompt.shape[1] :].tolist()


documents = cache(Documents)


@contextmanager
def serving(case: Case, folder: Path, authority: Authority) -> Iterator[dict[str, Client]]:
    """A client for each tenant of a service; with TLS, tenants and a data folder as the case has them."""
    options = ["--model", str(embedded_model()), "--launcher", "local", "--kv-bytes", "16000000", "--no-verify-model"]
    options += [*case.options, *case.fixed_options]
    options += ["--data-dir", str(folder / "data")] if case.restart != "none" else []
    access = dict.fromkeys(("tls_ca", "tls_cert", "tls_key", "credential"), "")
    if case.has_tls:
        certificate, key = authority.write("server")
        options += ["--tls-cert", str(certificate), "--tls-key", str(key)]
        access |= authority.access()
    if case.has_tenants:
        options += ["--credentials", str(write_credentials(folder))]
    with ExitStack() as stack:
        served = stack.enter_context(Served(*options))
        clients = dict[str, Client]()
        for tenant in (ACME, BOLT) if case.has_tenants else (ACME,):
            own = {"credential": credential_of(tenant)} if case.has_tenants else {}
            clients[tenant] = stack.enter_context(Client(served.address, **access | own))
        cluster = clients[ACME].cluster()
        assert (len(cluster.workers), cluster.window_keys) == (case.world_size, case.window_keys)
        assert {worker.weight_parts for worker in cluster.workers} == PARTS[case.weights, case.world_size]
        yield clients
        assert served.stop() == 0


PARTS = {("whole", 2): {0}, ("whole", 3): {0}, ("sharded", 2): {120}, ("sharded", 3): {80}}
"""The numbers of parts of ranks that share the weights."""


def ask(client: Client, tenant: str) -> tuple[list[int], Finished, bool]:
    """The tokens of an answer, its end, and whether keys were restored for it."""
    question = documents().texts[tenant].facts[0].question
    events = list(client.ask("book", question, max_tokens=NUM_TOKENS, ignore_end_token=True))
    tokens = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
    [end] = (event for event in events if isinstance(event, Finished))
    return tokens, end, any(isinstance(event, Recovering) for event in events)


def check_answers(clients: dict[str, Client], case: Case, *, are_restored: bool) -> None:
    for tenant, client in clients.items():
        tokens, end, is_restored = ask(client, tenant)
        assert tokens == documents().expected[tenant]
        assert is_restored == are_restored
        assert (end.usage.drafted_tokens > 0) == (case.drafts > 0)
        assert [context.id for context in client.list_contexts()] == ["book"]


def wait_saved(clients: Sequence[Client]) -> None:
    """Waits until the keys of all contexts are on storage."""
    deadline = time.monotonic() + 60
    while not all(client.get_context("book").storage_bytes for client in clients):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check(case: Case, folder: Path) -> None:
    authority = Authority(folder / "ca")
    with serving(case, folder, authority) as clients:
        for tenant, client in clients.items():
            client.ingest("book", documents().texts[tenant].text)
        check_answers(clients, case, are_restored=False)
        if case.restart == "none":
            return
        wait_saved(list(clients.values()))
    with serving(case.restarted(), folder, authority) as clients:
        check_answers(clients, case, are_restored=True)


@pytest.mark.parametrize("case", COVER, ids=lambda case: "-".join(map(str, case)))
def test_answers_equal_generate(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


def test_the_cover_has_every_two_values_of_settings() -> None:
    for first, second in itertools.combinations(range(len(SETTINGS)), 2):
        values = list(SETTINGS.values())
        expected = set(itertools.product(values[first], values[second]))
        assert {(case[first], case[second]) for case in COVER} == expected
    assert len(COVER) <= 12
