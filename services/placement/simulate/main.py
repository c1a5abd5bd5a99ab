"""Wiring of `kvfleet simulate`: a trace and flags in; tables or JSON on stdout, progress on stderr, a picture."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from kvfleet.placement.advice.autoscale import Rules
from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.simulate.fleet_shape import Autoscale, Below, Delays, FleetShape, Speed, Victim
from kvfleet.placement.simulate.report import as_values, autoscale_table, headline, loads_table, seconds, table
from kvfleet.placement.simulate.study import POLICIES, Study, make_study
from kvfleet.placement.simulate.trace import Trace, read_trace
from kvfleet.placement.workers.warm_up import warm_up
from kvproto.errors import InvalidRequest
from kvservice import launch
from kvservice.settings import die

PROGRAM = "kvfleet simulate"
MOST_WORKERS = 4096
SPEED, DELAYS, SHAPE, RULES, BELOW = Speed(), Delays(), FleetShape(), Rules(), Below(1)
CACHE_SHARE = 10  # a worker's default cache: a tenth of the blocks of the trace
LINK_GB_PER_S = 10.0  # of a fleet with roles: of a 100 Gbit/s network
DRAIN_S = 30.0  # default for workers that an autoscaler lets go


class Flags(argparse.ArgumentParser):
    """Says what is wrong in one line, as the other commands do."""

    def error(self, message: str) -> NoReturn:
        die(f"{PROGRAM}: {message}", 2)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names the defaults that are numbers; the texts say the others."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_number = type(action.default) in (int, float)
        return super()._get_help_string(action) if is_number else action.help


def flags() -> argparse.ArgumentParser:
    made = Flags(
        PROGRAM,
        description="Replays a trace, or a ledger that placement recorded, through the real placement on simulated "
        "workers: what would each policy have hit, and how long would everybody have waited? One core, no model.",
        formatter_class=Help,
        allow_abbrev=False,
    )
    trace = made.add_argument_group("what comes")
    trace.add_argument(
        "--trace", type=Path, required=True, help="JSON lines, Mooncake's format or a ledger; may be .gz"
    )
    trace.add_argument("--swell", type=_share, default=0.0, help="few requests at the ends, many in the middle: 0 to 1")
    trace.add_argument("--limit", type=_count, help="only the first so many requests")
    trace.add_argument(
        "--spread",
        action="store_true",
        help="requests of one moment evenly over the time to the next: for coarse clocks",
    )
    pace = trace.add_mutually_exclusive_group()
    pace.add_argument("--speed", type=_positive, help="times as fast as recorded; default: 1")
    pace.add_argument("--load", type=_positive, help="share of what the fleet could just do, instead of a speed")
    trace.add_argument("--loads", type=_loads, default=(), help="goodput at these loads too, such as 0.3,0.5,0.7,0.9")
    fleet = made.add_argument_group("the fleet")
    fleet.add_argument("--workers", type=_workers, help="how many")
    fleet.add_argument("--policy", type=_policies, default=(DEFAULT_POLICY,), help=f"{', '.join(POLICIES)}, or all")
    fleet.add_argument("--cache-blocks", type=_count, help="of each worker; default: a tenth of the trace's blocks")
    fleet.add_argument("--replicas", type=_count, default=SHAPE.replicas, help="of placement")
    fleet.add_argument("--prefill-workers", type=_count, help="so many of them for prompts alone, others for the rest")
    fleet.add_argument("--link-gb-per-s", type=_positive, help="from worker to worker; default: 0, with roles 10")
    fleet.add_argument("--churn-s", type=_positive, help="so often one worker leaves and another one joins")
    fleet.add_argument("--drain-s", type=_positive, help="for so long it goes on with what it has; default: not at all")
    scale = made.add_argument_group("as many workers as there is work for")
    scale.add_argument("--autoscale", type=_limits, metavar="MIN:MAX", help="beside a fixed fleet of MAX workers")
    scale.add_argument("--target-ttft-s", type=_positive, default=RULES.target_ttft_s, help="wait that it is to keep")
    scale.add_argument("--scale-up-s", type=_positive, default=RULES.up_s, help="above 80 %% for so long: more workers")
    scale.add_argument(
        "--scale-down-s", type=_positive, default=RULES.down_s, help="below 30 %% for so long: one fewer"
    )
    scale.add_argument("--start-s", type=_delay, default=60.0, help="until a new worker is ready")
    scale.add_argument("--scale-down", choices=["cheapest", "ordinal", "both"], default="cheapest", help="who goes")
    worker = made.add_argument_group("a worker")
    worker.add_argument("--prefill-tokens-per-s", type=_positive, default=SPEED.prefill_tokens_per_s, help="alone")
    worker.add_argument("--chunk-tokens", type=_count, default=SPEED.chunk_tokens, help="of a prompt in one step")
    worker.add_argument("--decode-ms", type=_positive, default=1e3 * SPEED.decode_base_s, help="a decode step")
    worker.add_argument("--decode-each-ms", type=_positive, default=1e3 * SPEED.decode_each_s, help="more per sequence")
    worker.add_argument("--slots", type=_count, default=SPEED.slots, help="sequences that run at once")
    worker.add_argument("--below-blocks", type=_count, help="of a tier below its device; default: there is none")
    worker.add_argument("--below-tokens-per-s", type=_positive, default=BELOW.tokens_per_s, help="restored from there")
    worker.add_argument("--pauses", action="store_true", help="told when conversations come back from a `tool`")
    wire = made.add_argument_group("what lies between")
    wire.add_argument("--event-delay-ms", type=_delay, default=1e3 * DELAYS.event_s, help="how late block events come")
    wire.add_argument("--share-bookings", action=argparse.BooleanOptionalAction, default=True, help="among replicas")
    said = made.add_argument_group("what is said")
    said.add_argument("--slo-ttft-s", type=_positive, default=5.0, help="a first token within this is good")
    said.add_argument("--seed", type=int, default=SHAPE.seed, help="of all chance")
    said.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    said.add_argument("--plot", type=Path, help="draw it into this file, as SVG (extra `plot`)")
    return made


def simulate(asked: argparse.Namespace, trace: Trace) -> Study:
    """Raises ValueError for a load if all requests come at once."""
    study = make_study(trace, _shape(asked, trace), speed=asked.speed, load=asked.load, slo_s=asked.slo_ttft_s)
    if asked.loads and study.full_speed is None:
        raise ValueError("all requests of the trace come at once: there is no rate to change")
    began = time.monotonic()
    for result in study.run(asked.policy):
        one = result.figures
        _progress(f"{one.policy}: TTFT p99 {seconds(one.ttft_p99_s)} ({time.monotonic() - began:.0f} s)")
    for load, one in study.run_loads(asked.policy, asked.loads) if asked.loads else ():
        _progress(f"{one.policy} at {load:g}: goodput {one.goodput_per_s:.2f}/s ({time.monotonic() - began:.0f} s)")
    for scaled in study.run_autoscaled(_scales(asked), asked.policy[0]) if asked.autoscale else ():
        _progress(f"{scaled.victim} goes: {scaled.worker_hours:.2f} worker-hours ({time.monotonic() - began:.0f} s)")
    return study


def _scales(asked: argparse.Namespace) -> list[Autoscale]:
    minimum, maximum = asked.autoscale
    rules = replace(
        RULES, target_ttft_s=asked.target_ttft_s, minimum=minimum, maximum=maximum, up_s=asked.scale_up_s,
        down_s=asked.scale_down_s,
    )  # fmt: skip
    victims = list(Victim) if asked.scale_down == "both" else [Victim(asked.scale_down)]
    return [Autoscale(rules, asked.start_s, victim) for victim in victims]


def _shape(asked: argparse.Namespace, trace: Trace) -> FleetShape:
    return FleetShape(
        workers=asked.workers or asked.autoscale[1],
        cache_blocks=asked.cache_blocks or max(trace.distinct_blocks // CACHE_SHARE, 1),
        replicas=asked.replicas,
        speed=Speed(
            prefill_tokens_per_s=asked.prefill_tokens_per_s,
            chunk_tokens=asked.chunk_tokens,
            decode_base_s=asked.decode_ms / 1e3,
            decode_each_s=asked.decode_each_ms / 1e3,
            slots=asked.slots,
        ),
        delays=Delays(event_s=asked.event_delay_ms / 1e3, booking_s=DELAYS.booking_s if asked.share_bookings else None),
        churn_s=asked.churn_s or 0.0,
        drain_s=asked.drain_s or (DRAIN_S if asked.autoscale else 0.0),
        seed=asked.seed,
        autoscale=_scales(asked)[0] if asked.autoscale else None,
        prefill_workers=asked.prefill_workers or 0,
        link_bytes_per_s=1e9 * (asked.link_gb_per_s or (LINK_GB_PER_S if asked.prefill_workers else 0.0)),
        below=Below(asked.below_blocks, asked.below_tokens_per_s, asked.pauses) if asked.below_blocks else None,
    )


def main(argv: list[str] | None = None) -> None:
    asked = flags().parse_args(argv)
    try:
        trace = read_trace(asked.trace, asked.limit)
        if (asked.workers is None) == (asked.autoscale is None):
            die(f"{PROGRAM}: one of --workers and --autoscale is needed", 2)
        if (asked.prefill_workers or 0) >= (asked.workers or MOST_WORKERS) or (
            asked.prefill_workers and asked.autoscale
        ):
            die(f"{PROGRAM}: --prefill-workers needs a fixed fleet of more --workers", 2)
        if asked.pauses and asked.below_blocks is None:
            die(f"{PROGRAM}: --pauses needs --below-blocks", 2)
        if asked.plot is not None:  # fail before minutes of work, not after them
            launch.with_extra("plot", lambda: launch.imported("matplotlib"))
            asked.plot.open("a").close()
        trace = trace.spread() if asked.spread else trace
        trace = trace.swollen(asked.swell) if asked.swell else trace
        warm_up()
        study = simulate(asked, trace)
        if asked.plot is not None:
            from kvfleet.placement.simulate.plot import plot  # its library comes with the extra `plot`

            asked.plot.write_text(plot(study))
            _progress(f"drawn into {asked.plot}")
    except (InvalidRequest, ValueError) as error:
        die(f"{PROGRAM}: {asked.trace}: {error}")
    except OSError as error:
        die(f"{PROGRAM}: {error.filename or asked.trace}: {error.strerror or error}")
    except KeyboardInterrupt:
        sys.exit(130)
    lines = [*headline(study), "", *table(study)]
    if study.at_loads:
        lines += ["", *loads_table(study)]
    if study.autoscaled:
        lines += ["", *autoscale_table(study)]
    if asked.json:
        lines = [json.dumps(as_values(study), allow_nan=False)]
    sys.stdout.write("\n".join(lines) + "\n")


def _progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _number(text: str, kind: Callable[[str], float], least: float, what: str, most: float = math.inf) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (least <= value <= most and value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


_positive = partial(_number, kind=float, least=1e-9, what="a number above 0")
_delay = partial(_number, kind=float, least=0, what="a number of 0 or more")
_share = partial(_number, kind=float, least=0, what="a share from 0 to 1", most=1)


def _count(text: str) -> int:
    return int(_number(text, int, 1, "a number of 1 or more"))


def _workers(text: str) -> int:
    count = _count(text)
    if count > MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"{count:,} workers are more than {MOST_WORKERS:,}")
    return count


def _limits(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    minimum, maximum = _count(low), _workers(high)
    if minimum > maximum:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX")
    return minimum, maximum


def _loads(text: str) -> tuple[float, ...]:
    return tuple(_positive(one) for one in text.split(",") if one.strip())


def _policies(text: str) -> tuple[str, ...]:
    if text == "all":
        return POLICIES
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name[:64]!r} is none of {', '.join(POLICIES)}, all")
    return names


if __name__ == "__main__":
    main()
