"""Every Prometheus metric of Reprise: names, labels and help, in one place.

Each process makes one of the classes below on a registry that it is given, and touches only its
attributes. Base units; label values are bounded (reasons, ends, states, phases). Label names that
Kubernetes scraping claims (pod, job, instance, namespace, container, endpoint, service) are not
used.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from protocol import __version__

SECONDS_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
SHARE_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LENGTH_BUCKETS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768)


class ProcessMetrics:
    """What every process has."""

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        build = Gauge(
            "reprise_build_info",
            "Constant 1; release and role.",
            ["release", "role"],
            registry=registry,
        )
        build.labels(__version__, role).set(1)
        self.state_seconds = Counter(
            "reprise_state_seconds_total",
            "Seconds spent by state.",
            ["role", "state"],
            registry=registry,
        )
        self.version_step = Gauge(
            "reprise_version_step", "Step of the weights in use.", ["role"], registry=registry
        )
        self.version_generation = Gauge(
            "reprise_version_generation",
            "Generation of the weights in use.",
            ["role"],
            registry=registry,
        )
        self.dead_letters = Counter(
            "reprise_dead_letters_total",
            "Records that could not be used.",
            ["role", "topic"],
            registry=registry,
        )


class SchedulerMetrics(ProcessMetrics):
    """The scheduler's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "scheduler")
        self.issued = Counter(
            "reprise_tasks_issued_total", "Tasks issued.", ["purpose", "reason"], registry=registry
        )
        self.ended = Counter(
            "reprise_tasks_ended_total", "Tasks ended, by end.", ["end"], registry=registry
        )
        self.in_flight = Gauge("reprise_tasks_in_flight", "Tasks not ended.", registry=registry)
        self.problems = Gauge(
            "reprise_problems", "Training problems by pool.", ["pool"], registry=registry
        )
        self.actors = Gauge("reprise_actors_joined", "Actors that hold a lease.", registry=registry)
        self.events = Counter(
            "reprise_events_total", "Events applied, by type.", ["type"], registry=registry
        )
        self.events_lag_seconds = Gauge(
            "reprise_events_lag_seconds",
            "Age of the newest of the scheduler's own ticks when it was applied.",
            registry=registry,
        )


class ActorMetrics(ProcessMetrics):
    """An actor's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "actor")


class LearnerMetrics(ProcessMetrics):
    """The learner's (rank 0)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "learner")
