"""`csattn build --jobs`: read the list, build it here or on a Ray cluster, show how far it is and what became of it."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from csattn.artifact.durable import unsynced
from csattn.build_options import BuildOptions
from index_build.batch import OUTCOMES, BatchReport, JobResult, run_batch
from index_build.job_list import read_jobs
from workers.capacity import require_room_for_weights
from workers.cli.batch_display import BatchDisplay, JsonBatchProgress
from workers.cli.building import use_threads
from workers.cli.terminal import err, out, table
from workers.cli.usage import UsageError


def build_jobs(
    jobs_file: Path,
    defaults: BuildOptions,
    store: Path | str,
    ray_address: str | None,
    threads: int | None,
    device: str,
    progress: str,
    sync: bool,
) -> dict[str, Any]:
    """Build and return the verb's JSON object. sync: what is made survives a loss of power."""
    jobs, started = read_jobs(jobs_file, defaults), time.perf_counter()
    if progress != "json":
        err.print(f"{len(jobs)} contexts to build" + (f" on the Ray cluster {ray_address}" if ray_address else ""))
    finished: dict[int, JobResult] = {}
    with JsonBatchProgress(jobs) if progress == "json" else BatchDisplay(jobs) as display:

        def on_result(idx: int, result: JobResult) -> None:
            finished[idx] = result
            display.on_result(idx, result)

        try:
            told: Any = {"on_progress": display.on_progress, "on_result": on_result, "num_threads": threads}
            if ray_address is None:
                use_threads(threads)
                with nullcontext() if sync else unsynced():
                    report = run_batch(jobs, store, device=device, require_room=_require_room, **told)
            else:
                from index_build.jobs import run_on_ray

                report = run_on_ray(jobs, store, ray_address, device=device, **told)
        except KeyboardInterrupt:
            results = tuple(finished[idx] for idx in sorted(finished))
            show_summary(BatchReport(results, time.perf_counter() - started))
            raise
    show_summary(report)
    return report.to_json()


def _require_room(options: BuildOptions) -> None:
    require_room_for_weights(options.model, options.dtype, options.weights)


def require_one_source(
    context: str | None, tokens_file: Path | None, jobs_file: Path | None, ray_address: str | None, sync: bool
) -> None:
    """`build` takes one context or one list, a cluster only for a list, which waits for its disks."""
    if sum(source is not None for source in (context, tokens_file, jobs_file)) != 1:
        raise UsageError("build takes --context FILE, --tokens FILE or --jobs FILE; give one of them")
    if ray_address is not None and jobs_file is None:
        raise UsageError("--ray builds the contexts of a list; give --jobs FILE, or leave --ray out")
    if ray_address is not None and not sync:
        raise UsageError("--no-sync is for builds in this process; leave it out with --ray")


def show_summary(report: BatchReport) -> None:
    """A row per context, a line for each failure, a line for all."""
    rows = []
    for result in report.results:
        rate = result.tokens_per_s
        rows.append(
            [
                result.job.context.name,
                result.outcome,
                result.artifact_id or "",
                f"{result.context_len:,}" if result.context_len else "",
                f"{result.seconds:.1f}",
                "" if rate is None else f"{rate:.0f}",
            ]
        )
    out.print(table("Contexts", ["context", "", "artifact", "tokens", "seconds", "tokens/s"], rows))
    for result in report.results:
        if result.error is not None:
            out.print(f"line {result.job.line}, {result.job.context.name}: {result.error}", soft_wrap=True)
    counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in OUTCOMES if report.count(outcome))
    out.print(f"{counts or 'nothing finished'}; {report.seconds:.1f} s in all")
