"""The learner's process: every rank carries out rank 0's orders; rank 0 also talks to Kafka.

Invariant: one code path for one rank and for many. The Kafka clients live on their own thread, so
training starves none of them; a main thread that makes no progress within the deadlines ends the
process.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from learner import orders
from learner.batch import assemble
from learner.deepspeed_config import check_learner
from learner.generation import take_generation
from learner.inbox import Inbox, LearnerError
from learner.lead import Lead, Trained
from learner.monitor import Monitor
from learner.orders import Leave, Order, Save, Train
from learner.ranks import Ranks
from learner.trainer import MakeTrainer, Trainer
from protocol.codec import decode
from protocol.config import Config, load_config
from protocol.http import MonitorServer
from protocol.kafka import Kafka
from protocol.loops import LoopThread, MainWatch
from protocol.messages import RewardGroup
from protocol.rundir import RunDir

log = logging.getLogger(__name__)

NAME = "learner"


def run(directory: Path, make_trainer: MakeTrainer) -> None:
    """The life of one rank. Returns when the run has ended as it should.

    Raises ConfigError, OSError (model, run directory, port), BrokerError, LearnerError.
    """
    config = load_config(directory / "config.yaml")
    check_learner(config)
    run_dir = RunDir(directory)
    ranks = Ranks.connect(config.learner.ranks, config.waits.collective)
    try:
        if ranks.leads:
            _lead(config, run_dir, ranks, make_trainer)
        else:
            # Rank 0 decides when to stop, also where the signal reaches every rank.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            trainer = make_trainer(config, ranks, lambda: None)
            while not isinstance(order := _share(ranks, None), Leave):
                _carry_out(order, config, trainer)
            if order.error:
                raise LearnerError(order.error)
    finally:
        ranks.close()


def _lead(config: Config, run_dir: RunDir, ranks: Ranks, make_trainer: MakeTrainer) -> None:
    """Rank 0: monitoring and Kafka around the same loop."""
    registry = CollectorRegistry()
    monitor = Monitor(registry, config.waits)
    with contextlib.ExitStack() as stack:
        server = MonitorServer(registry, monitor.health, config.metrics.host, config.metrics.port)
        stack.callback(server.stop)
        run_dir.register_process(NAME, server.port)
        watch = MainWatch(_longest_silence(config))
        stack.callback(watch.stop)
        generation = take_generation(run_dir.generations)
        log.info("generation %d, %d ranks on %s", generation, ranks.size, ranks.device.type)
        kafka = LoopThread()
        stack.callback(kafka.stop)
        client = Kafka(config.kafka, wait=config.waits.kafka, client_id="reprise-learner")
        inbox = Inbox(client, run_dir.identity.topics, config, generation)
        stack.callback(lambda: kafka.run_blocking(inbox.stop()))
        lead = Lead(config, run_dir, generation, inbox, kafka, monitor)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(lead, "stop_requested", True))
        kafka.run_blocking(inbox.start())
        monitor.enter("loading")
        trainer = make_trainer(config, ranks, watch.alive)
        _follow_lead(lead, config, ranks, trainer, watch)


def _follow_lead(
    lead: Lead, config: Config, ranks: Ranks, trainer: Trainer, watch: MainWatch
) -> None:
    """Share each order of `lead`, carry it out, and tell `lead` what came of it."""
    course = lead.orders()
    outcome: Trained | None = None
    while True:
        watch.alive()
        try:
            order = course.send(outcome)
        except Exception as error:
            # The other ranks leave too, instead of waiting for their deadline.
            _share(ranks, Leave(error=f"rank 0: {error}"))
            raise
        order = _share(ranks, order)
        if isinstance(order, Leave):
            return
        outcome = _carry_out(order, config, trainer)


def _share(ranks: Ranks, order: Order | None) -> Order:
    """Rank 0's order, on every rank."""
    return orders.decode(ranks.share(None if order is None else orders.encode(order)))


def _carry_out(order: Order, config: Config, trainer: Trainer) -> Trained | None:
    """Do what the order says."""
    if isinstance(order, Train):
        started = time.monotonic()
        limit = config.kafka.max_message_bytes
        groups = [decode(raw, RewardGroup, max_bytes=limit) for raw in order.groups]
        batch = assemble(groups, order.version, config)
        assembled = time.monotonic()
        result = trainer.step(batch)
        return Trained(result, assembled - started, time.monotonic() - assembled)
    if isinstance(order, Save):
        trainer.save(Path(order.directory))
    return None


def _longest_silence(config: Config) -> float:
    """Seconds after which the main thread hangs: no single wait of it is allowed to last longer."""
    waits = config.waits
    return max(waits.collective, waits.group, waits.kafka, waits.loading) + waits.main
