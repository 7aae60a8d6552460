"""Metrics that are read from the service on each scrape."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from coordinator.telemetry.counters import STEP_SECONDS, Counts
from coordinator.telemetry.metric_sources import Count, MetricSources
from longleaf.errors import LongleafError
from longleaf.types import Cluster, Worker

BOUNDS = [*map(str, STEP_SECONDS), "+Inf"]
Labels = Mapping[str, str]


class Gauges:
    """A Collector of the values read by the last `refresh`. `build` describes the service in constant labels."""

    def __init__(self, sources: MetricSources, model: str, build: Labels) -> None:
        self._sources = sources
        self._model = model
        self._build = build
        self._seen: list[Metric] = []

    def collect(self) -> list[Metric]:
        """May be called by any thread."""
        return self._seen

    def refresh(self) -> None:
        """Read all values, on the event loop. Values that are unavailable are omitted."""
        seen = [self._gauge("build_info", "1; the labels describe the service.", self._build, 1)]
        with suppress(LongleafError):
            seen += self._of_cluster(self._sources.cluster())
        seen += self._of_counts(self._sources.counts())
        seen += self._alerts()
        self._seen = seen

    # --- the ranks and the load ---

    def _of_cluster(self, cluster: Cluster) -> list[Metric]:
        workers = cluster.workers
        return [
            self._gauge("requests_running", "Running generations and ingests.", {}, cluster.running),
            self._gauge("requests_waiting", "Waiting generations and ingests.", {}, cluster.waiting),
            self._gauge("epoch", "Number of the epoch; it grows with every change of ranks.", {}, cluster.epoch),
            self._gauge("ranks", "Number of ranks.", {}, cluster.world_size),
            self._by_rank(
                "kv_cache_tokens",
                "Tokens whose keys and values are on the rank.",
                workers,
                lambda w: w.tokens,
            ),
            self._by_rank(
                "kv_cache_capacity_tokens", "Capacity of its pool in tokens.", workers, lambda w: w.max_tokens
            ),
            self._by_rank("kv_cache_usage_ratio", "Used share of the capacity.", workers, _used),
            self._by_rank(
                "weight_bytes", "Bytes of the model's weights on the rank.", workers, lambda w: w.weight_bytes
            ),
            self._gauge(
                "missing_weights_ratio",
                "Fraction of sharded weights that no rank holds, while all answers wait for it.",
                {},
                cluster.missing_weights,
            ),
            *self._of_states(cluster),
            *self._of_merges(cluster),
        ]

    def _by_rank(
        self, name: str, help_text: str, workers: Iterable[Worker], value: Callable[[Worker], float]
    ) -> Metric:
        family = GaugeMetricFamily(f"longleaf_{name}", help_text, labels=("model", "rank"))
        for worker in workers:
            family.add_metric((self._model, str(worker.rank)), value(worker))
        return family

    def _of_states(self, cluster: Cluster) -> list[Metric]:
        """The pool of recurrent states, if the model has any."""
        if not cluster.max_states:
            return []
        return [
            self._gauge("recurrent_states", "Recurrent states in use, on every rank.", {}, cluster.states),
            self._gauge("recurrent_state_capacity", "Recurrent states that fit.", {}, cluster.max_states),
            self._gauge("recurrent_state_bytes", "Bytes of one recurrent state on a rank.", {}, cluster.state_bytes),
        ]

    def _of_merges(self, cluster: Cluster) -> list[Metric]:
        """The merge timings, if the ranks measured them to choose a merge."""
        if not cluster.merge_timings:
            return []
        message = (
            "Median seconds to merge the partials of one layer, measured at the start for the smallest number of rows."
        )
        family = GaugeMetricFamily("longleaf_merge_seconds", message, labels=("model", "kind"))
        fewest = min(cluster.merge_timings, key=lambda timing: timing.rows)
        for merge, microseconds in sorted(fewest.microseconds.items()):
            family.add_metric((self._model, merge), microseconds / 1e6)
        return [family]

    # --- counters of the engine ---

    def _of_counts(self, counts: Counts) -> list[Metric]:
        labels = ("model", "kind")
        steps = CounterMetricFamily("longleaf_steps", "Completed steps.", labels=labels)
        message = "Compute time of rank 0 per step."
        seconds = HistogramMetricFamily("longleaf_step_seconds", message, labels=labels)
        for kind, times in sorted(counts.steps.items()):
            steps.add_metric((self._model, kind), times.count)
            buckets = list(zip(BOUNDS, map(float, accumulate(times.buckets)), strict=True))
            seconds.add_metric((self._model, kind), buckets, times.seconds)
        found = [
            steps,
            seconds,
            self._counter("merge_bytes", "Bytes of packed partials that rank 0 passed to merges.", counts.merge_bytes),
            self._counter("preemptions", "Preempted answers, which returned to the queue.", counts.num_preempted),
            self._counter(
                "recomputed_tokens",
                "Tokens recomputed because their keys were lost or evicted.",
                counts.num_recomputed_tokens,
            ),
            *self._of_drafts(counts),
            self._gauge("contexts", "Number of contexts.", {}, counts.num_contexts),
        ]
        if counts.snapshot_bytes is not None:
            message = "Bytes of keys and values of contexts on storage."
            found.append(self._gauge("snapshot_bytes", message, {}, counts.snapshot_bytes))
        return found

    def _of_drafts(self, counts: Counts) -> list[Metric]:
        drafted = "Drafted tokens that a step verified."
        accepted, sampled = "Accepted drafted tokens.", "Sampled tokens of answers."
        steps = "Decode steps, counted once per answer in each."
        return [
            self._counter("drafted_tokens", drafted, counts.num_drafted),
            self._counter("accepted_draft_tokens", accepted, counts.num_accepted),
            self._counter("sampled_tokens", sampled, counts.num_sampled),
            self._counter("sequence_steps", steps, counts.num_sequence_steps),
        ]

    # --- metrics for alerts ---

    def _alerts(self) -> list[Metric]:
        sources = self._sources
        found: list[Metric] = [self._counter("ranks_lost", "Lost members.", sources.ranks_lost())]
        message = "Failed reloads of a changed file; the previous content stays in use."
        reloads = CounterMetricFamily("longleaf_reload_failures", message, labels=("model", "file"))
        for file, count in sorted(sources.failed_reloads.items()):
            reloads.add_metric((self._model, file), count())
        if sources.failed_reloads:
            found.append(reloads)
        message = "1 while the current content of a file is invalid; the previous content stays in use."
        unusable = GaugeMetricFamily("longleaf_file_unusable", message, labels=("model", "file"))
        for file, is_unusable in sorted(sources.unusable_files.items()):
            unusable.add_metric((self._model, file), is_unusable())
        if sources.unusable_files:
            found.append(unusable)
        message = "Calls without a credential or with an unknown one."
        found += self._optional("refused_credentials", message, sources.refused_credentials)
        message = (
            "Rejected unauthenticated connections to the control channel, and dropped messages from former members."
        )
        found += self._optional("rejected_connections", message, sources.rejected_connections)
        expiry = None if sources.certificate_expiry is None else sources.certificate_expiry()
        if expiry is not None:
            message = "Expiry of the server certificate, in seconds since the Unix epoch."
            found.append(self._gauge("certificate_expiry_timestamp_seconds", message, {}, expiry))
        return found

    def _optional(self, name: str, help_text: str, count: Count | None) -> list[Metric]:
        return [] if count is None else [self._counter(name, help_text, count())]

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"longleaf_{name}", help_text, labels=("model",))
        family.add_metric((self._model,), value)
        return family

    def _gauge(self, name: str, help_text: str, labels: Labels, value: float) -> Metric:
        labels = {"model": self._model, **labels}
        family = GaugeMetricFamily(f"longleaf_{name}", help_text, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), value)
        return family


def _used(worker: Worker) -> float:
    return worker.tokens / worker.max_tokens if worker.max_tokens else 0.0
