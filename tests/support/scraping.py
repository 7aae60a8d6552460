"""Metrics as Prometheus gets them: asked for over HTTP, parsed by its own library."""

import asyncio
import urllib.request
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scraped:
    """One answer."""

    text: str

    @property
    def families(self) -> dict[str, Metric]:
        """By their names; those of counters without `_total`."""
        return {family.name: family for family in text_string_to_metric_families(self.text)}

    @property
    def samples(self) -> dict[tuple[str, Labels], float]:
        """Each series, by its name and labels but for the model, sorted."""
        found = dict[tuple[str, Labels], float]()
        for family in self.families.values():
            for sample in family.samples:
                labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model"))
                assert (sample.name, labels) not in found, f"{sample.name}{labels} is there twice"
                found[sample.name, labels] = sample.value
        return found

    def value(self, name: str, **labels: str) -> float:
        """The value of one series. Raises KeyError."""
        return self.samples[name, tuple(sorted(labels.items()))]

    @property
    def label_names(self) -> set[str]:
        return {label for family in self.families.values() for sample in family.samples for label in sample.labels}


async def scrape(url: str) -> Scraped:
    """Asks a running service."""
    return Scraped(await asyncio.to_thread(_get, url))


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()
