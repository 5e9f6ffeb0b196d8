"""The loop that drives one :class:`SubtaskRunner` on one thread until it is over.

Called by the thread and process shells. What must never happen here: an error that ends the loop without a report to the node.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream_schema.channels import Transport
from millstream_schema.control import Deployment, Failed
from millstream_schema.model import Override
from millstream_schema.pipeline import FactoryRegistry, rebuilt

from ..runner.causes import cause_of
from ..runner.environment import Environment, LeaseExpired
from ..runner.subtask import SubtaskRunner


def make_runner(registry: FactoryRegistry, deployment: Deployment, environment: Environment) -> SubtaskRunner | None:
    """Rebuild the plan here and compare; None after the failure was reported."""
    overrides = {name: Override(**fields) for name, fields in deployment.overrides.items()}
    try:
        pipeline, model, plan = rebuilt(
            registry, deployment.factory, deployment.config, deployment.parallelism, overrides, deployment.plan_fingerprint
        )
    except Exception as exc:
        environment.report(Failed(cause_of(exc), f"{type(exc).__name__}: {exc}"))
        return None
    return SubtaskRunner(deployment, pipeline, model, plan, environment)


def drive(runner: SubtaskRunner, transport: Transport, stopped: Callable[[], bool]) -> None:
    """Run to the end; every error is reported, none is swallowed."""
    try:
        runner.start()
        while not runner.over and not stopped():
            wait = runner.step()
            if wait > 0.0 and not runner.over:
                transport.wait(wait)
    except (Exception, LeaseExpired) as exc:  # a defect, ours or a connector's, too: the attempt fails and says so
        runner.fail(exc)
    finally:
        runner.close()
