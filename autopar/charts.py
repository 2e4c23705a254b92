"""Frontiers and what-ifs for people and for other programs: tables, CSV and a plot as SVG. From values to text."""

from __future__ import annotations

import csv
import io
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from autopar.finalists import peak_bytes, step_s
from autopar.frontier import Frontier, WhatIf
from autopar.plan import Plan
from autopar.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "memory_bytes",
    "step_s",
    "samples_per_s",
    "objective_ns",
    "lower_bound_ns",
    "pp",
    "num_micro_batches",
    "schedule",
    "strategies",
)

ROWS = 24
"""The table shows at most so many breakpoints, from the first to the last."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 420, 80, 30, 40, 60


def throughput(plan: Plan) -> float:
    """Samples a second."""
    return plan.request.global_batch / step_s(plan)


def strategies_words(plan: Plan) -> str:
    """The strategies of the chain in order, with how often each comes: `dp8-z2, 32 x dp4-tp2, dp8-z2`."""
    runs = [(short, len(list(same))) for short, same in groupby(strategy.short for strategy in plan.strategies)]
    return ", ".join(f"{count} x {short}" if count > 1 else short for short, count in runs)


def frontier_table(found: Frontier) -> Table:
    """The frontier, most memory first."""
    from rich.table import Table

    title = "best step by memory" + ("" if found.complete else " (stopped: leaner plans may exist)")
    table = Table(title=title, title_justify="left")
    for name in ("memory", "step", "samples/s", "stages", "micro-batches"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("strategies")
    count = len(found.plans)
    shown = sorted({i * (count - 1) // (ROWS - 1) for i in range(ROWS)}) if count > ROWS else range(count)
    if count > ROWS:
        table.caption = f"{len(shown)} of {count} breakpoints; the CSV has all"
    for plan in (found.plans[i] for i in shown):
        table.add_row(
            format_bytes(peak_bytes(plan)),
            format_seconds(step_s(plan)),
            f"{throughput(plan):.4g}",
            str(plan.pp),
            str(plan.num_micro_batches),
            strategies_words(plan),
        )
    return table


def frontier_csv(found: Frontier) -> str:
    """The frontier as CSV with the columns COLUMNS."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for plan in found.plans:
        certificate = plan.certificate
        bounds = (certificate.objective_ns, certificate.lower_bound_ns) if certificate else ("", "")
        writer.writerow(
            (
                peak_bytes(plan),
                repr(step_s(plan)),
                repr(throughput(plan)),
                *bounds,
                plan.pp,
                plan.num_micro_batches,
                plan.schedule,
                strategies_words(plan),
            )
        )
    return out.getvalue()


def frontier_svg(found: Frontier, *, title: str = "") -> str:
    """The frontier as a step plot: memory of a rank to the right, samples a second up."""
    points = [(peak_bytes(plan) / GIB, throughput(plan)) for plan in reversed(found.plans)]
    least, most = points[0][0], points[-1][0]
    span = (most - least) or most
    right, top = most + 0.08 * span, max(y for _, y in points) * 1.1
    left = max(0.0, least - 0.08 * span)

    def x(value: float) -> float:
        return _LEFT + (value - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)

    path = f"M{x(points[0][0]):.1f},{y(points[0][1]):.1f}"
    for memory, rate in points[1:]:
        path += f"H{x(memory):.1f}V{y(rate):.1f}"
    path += f"H{x(right):.1f}"
    axis = 'stroke="#444" stroke-width="1"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="14">{escape(title)}</text>',
        f'<path d="M{_LEFT},{_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}" fill="none" {axis}/>',
    ]
    for i in range(5):
        memory, rate = left + (right - left) * i / 4, top * i / 4
        parts.append(f'<text x="{x(memory):.1f}" y="{_HEIGHT - 40}" text-anchor="middle">{memory:.4g}</text>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.3g}</text>')
    parts.append(f'<path d="{path}" fill="none" stroke="#1f77b4" stroke-width="2"/>')
    parts += [
        f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.5" fill="#1f77b4"><title>{a:.3f} GiB, {b:.4g}</title></circle>'
        for a, b in points
    ]
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 14}" text-anchor="middle">memory of a rank [GiB]</text>')
    middle = _HEIGHT / 2
    parts.append(
        f'<text x="20" y="{middle}" text-anchor="middle" transform="rotate(-90 20 {middle})">samples/s</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def what_if_table(found: WhatIf) -> Table:
    """The plan of today now and after the change, and the best plan then."""
    from rich.table import Table

    table = Table(title=f"what if {found.change}", title_justify="left")
    for name in ("", "step", "of today's", "peak"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    table.add_column("plan")
    rows = [("today", found.now), ("today's plan then" + ("" if found.fits else ", which does not fit"), found.then)]
    rows += [("the best plan then", found.best)] if found.best is not None else []
    for name, plan in rows:
        words = f"{plan.pp} stages, {plan.num_micro_batches} micro-batches: {strategies_words(plan)}"
        of_today = f"{100 * step_s(plan) / step_s(found.now):.1f} %"
        table.add_row(name, format_seconds(step_s(plan)), of_today, format_bytes(peak_bytes(plan)), words)
    if found.best is None:
        table.add_row("the best plan then", "-", "-", "-", "nothing fits")
    return table
