"""Every Prometheus metric of Reprise: names, labels and help, in one place.

Each process makes one of the classes below on a registry that it is given, and touches only its
attributes. Base units; label values are bounded (reasons, ends, states, phases). Label names that
Kubernetes scraping claims (pod, job, instance, namespace, container, endpoint, service) are not
used.
"""

from __future__ import annotations

from typing import ClassVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
        self.reissued = Counter(
            "reprise_tasks_reissued_total",
            "Further attempts of tasks that an actor lost or gave back.",
            ["purpose"],
            registry=registry,
        )
        self.ended = Counter(
            "reprise_tasks_ended_total", "Tasks ended, by end.", ["end"], registry=registry
        )
        self.zero_variance = Counter(
            "reprise_groups_zero_variance_total",
            "Training groups whose rewards are all equal, by kind.",
            ["kind"],
            registry=registry,
        )
        self.in_flight = Gauge("reprise_tasks_in_flight", "Tasks not ended.", registry=registry)
        self.problems = Gauge(
            "reprise_problems", "Training problems by pool.", ["pool"], registry=registry
        )
        self.actors = Gauge("reprise_actors_joined", "Actors that hold a lease.", registry=registry)
        self.wanted_slots = Gauge(
            "reprise_wanted_slots",
            "Tasks that could run now, were there slots for all of them.",
            registry=registry,
        )
        self.notes = Counter(
            "reprise_scheduler_notes_total",
            "What was unusual: late outcomes, re-issues, events that did not fit.",
            ["kind"],
            registry=registry,
        )
        self.groups = Counter(
            "reprise_groups_total",
            "Training groups whose outcomes came in, by why their problem was chosen.",
            ["reason", "variance"],
            registry=registry,
        )
        self.zero_variance_share = Gauge(
            "reprise_zero_variance_share",
            "Share of the last step's groups whose rewards were all equal, before filtering.",
            registry=registry,
        )
        self.replay_share = Gauge(
            "reprise_replay_share",
            "Share of the last round's groups whose problem had been visited before.",
            registry=registry,
        )
        self.reward = Gauge(
            "reprise_reward_mean",
            "Mean reward of the last step: of trained groups (held near one half by selection), "
            "and of exploration draws (unbiased).",
            ["groups"],
            registry=registry,
        )
        self.accuracy = Gauge(
            "reprise_accuracy",
            "Newest evaluation: mean@n, pass@n and greedy.",
            ["eval_set", "figure"],
            registry=registry,
        )
        self.batch_groups = Counter(
            "reprise_batch_groups_total",
            "Groups of released batches: planned, and released.",
            ["kind"],
            registry=registry,
        )
        self.rollouts = Gauge(
            "reprise_rollouts", "Completions of training tasks so far.", registry=registry
        )
        self.rollout_tokens = Gauge(
            "reprise_rollout_tokens", "Tokens of those completions.", registry=registry
        )
        self.log_seconds = Gauge(
            "reprise_log_time_seconds", "Sum of the ticks: the run's own time.", registry=registry
        )
        self.events = Counter(
            "reprise_events_total", "Events applied, by type.", ["type"], registry=registry
        )
        self.events_lag_seconds = Gauge(
            "reprise_events_lag_seconds",
            "Age of the newest of the scheduler's own ticks when it was applied, or of the oldest "
            "that is not applied yet.",
            registry=registry,
        )
        self.events_lag_records = Gauge(
            "reprise_events_lag_records", "Events written and not applied.", registry=registry
        )
        self.unacknowledged = Gauge(
            "reprise_unacknowledged_records",
            "Records sent that the broker has not acknowledged.",
            registry=registry,
        )
        self.snapshots = Counter(
            "reprise_snapshots_total", "Snapshots, by result.", ["result"], registry=registry
        )
        self.snapshot_seconds = Gauge(
            "reprise_snapshot_seconds",
            "Time that the newest snapshot held up the events.",
            registry=registry,
        )


class ActorMetrics(ProcessMetrics):
    """An actor's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "actor")
        self.tokens = Counter(
            "reprise_actor_tokens_total", "Completion tokens sampled.", registry=registry
        )
        self.held = Gauge(
            "reprise_actor_tasks_held",
            "Tasks held: waiting, running in the engine, or finishing (graded, sent).",
            ["state"],
            registry=registry,
        )
        self.attempts = Counter(
            "reprise_actor_attempts_total",
            "Attempts ended: group sent, without variance, evaluated, failed, released.",
            ["end"],
            registry=registry,
        )
        self.generate_seconds = Histogram(
            "reprise_actor_generate_seconds",
            "From a task's start to its last token.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.grade_seconds = Histogram(
            "reprise_actor_grade_seconds",
            "Grading one group, waiting for a grader included.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.grader_failures = Counter(
            "reprise_actor_ungraded_completions_total",
            "Completions without a reward: the grader raised, died, gave none, or left the range.",
            ["kind"],
            registry=registry,
        )
        self.load_seconds = Histogram(
            "reprise_actor_load_seconds",
            "Putting new weights into the engine, from its pause to its resumption.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )


class LearnerMetrics(ProcessMetrics):
    """The learner's (rank 0). `step` holds one gauge for each of `STEP`, of the last step."""

    STEP: ClassVar[dict[str, str]] = {
        "loss": "Loss of the step.",
        "entropy": "Mean entropy of the tempered distribution over trained tokens, in nats.",
        "clip_share": "Share of trained tokens whose gradient the clip takes away.",
        "weight_truncated_share": "Share of trained tokens whose importance weight is truncated.",
        "weight_mean": "Mean importance weight of learner over sampler, truncated.",
        "weight_max_deviation": "Largest |importance weight - 1|.",
        "kl_sampler": "Estimated KL(sampler || learner) per token, in nats.",
        "logprob_gap_mean": "Mean |log-prob of learner - of sampler| over trained tokens.",
        "logprob_gap_max": "Largest |log-prob of learner - of sampler|.",
        "length_mean": "Mean length of the trained groups' completions, in tokens.",
        "length_p95": "95th percentile of the trained groups' completion lengths, in tokens.",
        "truncated_share": "Share of the trained groups' completions that were cut off.",
        "grad_norm": "Norm of the gradient before clipping.",
        "lr": "Learning rate of the first parameter group.",
        "reward_mean": "Mean reward of trained groups; held near 1/2 by selection, not progress.",
        "reward_explored_mean": "Mean reward of those exploration draws that were trained.",
        "mean_abs_advantage": "Mean |advantage| over graded completions.",
        "staleness_mean": "Mean age of the trained groups' oldest tokens, in steps.",
        "impure_trained": "Trained groups that are not of exactly the step's version.",
    }

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "learner")
        self.step = {
            name: Gauge(f"reprise_learner_{name}", text, registry=registry)
            for name, text in self.STEP.items()
        }
        self.steps = Counter(
            "reprise_learner_steps_total",
            "Batches done, by whether the weights changed (updated, skipped).",
            ["result"],
            registry=registry,
        )
        self.groups_ended = Counter(
            "reprise_learner_groups_total",
            "Groups of released batches, by end.",
            ["end"],
            registry=registry,
        )
        self.tokens = Counter(
            "reprise_learner_tokens_total",
            "Tokens trained, by kind (completion, prompt).",
            ["kind"],
            registry=registry,
        )
        self.phase_seconds = Histogram(
            "reprise_learner_phase_seconds",
            "Seconds of each step by phase (wait, assemble, train, publish).",
            ["phase"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.published_bytes = Counter(
            "reprise_learner_published_bytes_total",
            "Bytes of weights published.",
            registry=registry,
        )
        self.groups_kept = Gauge(
            "reprise_learner_groups_kept", "Groups kept for a later batch.", registry=registry
        )
        self.kept_bytes = Gauge(
            "reprise_learner_groups_kept_bytes", "Bytes of those groups.", registry=registry
        )
