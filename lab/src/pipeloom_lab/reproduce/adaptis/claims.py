"""What AdaPtis claims."""

from __future__ import annotations

from pipeloom_lab.reproduce.claims import Claim, Found, OwnFigure

_SYSTEMS = ("S-1F1B", "I-1F1B", "ZB", "Mist")
_HETEROGENEOUS = ("Gemma", "DeepSeek", "Nemotron-H")
_UNSTATED = "The paper states neither P nor the number of microbatches, on which it depends."
_SLEEP = "Ranks that sleep as long as they would compute; no kernel was timed."
_GRID = "Every system has the best degrees of its own grid here; the paper fixes them and does not state them."
PIPELINES = ("4", "8", "16")
_DEVICES = ("8", "16", "32", "64", "128")
_OWN_GENERATOR = "Share of the full tuning's throughput: AdaPtis"


def _over(system: str, group: tuple[str, str]) -> Found:
    """Pipeloom's, of one P and number of microbatches a rank, or of all."""
    return Found("figure-8-depths", system, group, "Our throughput over each system")


def over_mist(column: str, pipeline: str) -> Found:
    """Of one P, or of all, the mean of two and of four microbatches a rank."""
    return Found("figure-8-depths", column, (pipeline, "both"), "Over Mist")


def _last_result(program: str) -> tuple[Found, ...]:
    """How the last try of each size ended."""
    return tuple(Found("figure-13-programs", "result at last", (size,), f"How {program} ended") for size in "SML")


def _last_number(program: str) -> dict[str, Found]:
    """At how many microbatches each size was tried last."""
    table = f"How {program} ended"
    return {size.lower(): Found("figure-13-programs", "microbatches at last", (size,), table) for size in "SML"}


def _depths() -> tuple[Claim, ...]:
    """Over Mist by pipeline degree."""
    return tuple(
        Claim(
            f"figure-8-mist-p{pipeline}",
            f"P = {pipeline}: throughput over Mist, average, of two and of four microbatches a rank",
            "AdaPtis Fig. 8, §5.1, §5.2",
            "1.20, 1.20 times",
            (_over("Mist", (pipeline, "2")), _over("Mist", (pipeline, "4"))),
            "at least",
            "Assumed, since the paper states neither: its figure is of this P and of two and four microbatches a rank. "
            "Of all models that fit, {both} of both; its generator, written again, has {generator}.",
            "times",
            {
                "generator": over_mist("AdaPtis over Mist, average", pipeline),
                "both": over_mist("over Mist, average", pipeline),
            },
            speedup=True,
        )
        for pipeline in PIPELINES
    )


def _figure_1() -> tuple[Claim, ...]:
    """One claim for each model."""
    paper = {
        "LLaMA-2": "18.0, 2.7, 11.5, 6.8 %",
        "Gemma": "36.2, 30.3, 34.9, 20.7 %",
        "DeepSeek": "44.7, 39.5, 43.8, 25.6 %",
        "Nemotron-H": "47.9, 51.1, 47.2, 41.5 %",
    }
    return tuple(
        Claim(
            f"figure-1-{model.lower()}",
            f"{model}: bubbles under S-1F1B, I-1F1B, ZB, Mist",
            "AdaPtis Fig. 1",
            figures,
            tuple(Found("figure-1", system, (model,)) for system in _SYSTEMS),
            "near",
            "Costs are of a device table, sequences of 4096 tokens; the paper does not state its own. Pipeloom has "
            "{ours} %.",
            "%",
            {"ours": Found("figure-1", "ours", (model,))},
            of="written again",
        )
        for model, figures in paper.items()
    )


def _figure_8() -> tuple[Claim, ...]:
    """Averages over each system. The largest that the paper names are of other sequences, and stand with Fig. 9."""
    paper = {"S-1F1B": 1.34, "I-1F1B": 1.42, "ZB": 1.34, "Mist": 1.20}
    idle = "With two this system idles most."
    beside = {
        "S-1F1B": idle,
        "I-1F1B": "It has the number of chunks that suits it best here.",
        "ZB": idle,
        "Mist": "Both cut layers by their time; Mist's is its partition only.",
    }
    return tuple(
        Claim(
            f"figure-8-{system.lower()}-average",
            f"Throughput over {system}, average",
            "AdaPtis Fig. 8, §5.2 (`of up to`), abstract",
            f"{figure:.2f} times",
            (_over(system, ("all", "both")),),
            "at least",
            f"{_UNSTATED} Ours are of P = 4, 8 and 16 and of two and four microbatches a rank; of four alone "
            f"{{p4}}, {{p8}} and {{p16}}. {beside[system]}",
            "times",
            {f"p{pipeline}": _over(system, (pipeline, "4")) for pipeline in PIPELINES},
            speedup=True,
            incomparable=True,
        )
        for system, figure in paper.items()
    )


def _figure_9() -> tuple[Claim, ...]:
    paper = {"S-1F1B": "1.54", "I-1F1B": "2.14", "ZB": "1.51", "Mist": "1.27"}
    uneven = " Equal stages are unevener here than in the paper; over Mist, which cuts by time, less is gained."
    idle = {"S-1F1B": uneven, "ZB": uneven}
    return tuple(
        Claim(
            f"figure-9-{system.lower()}",
            f"Sequences of 1K to 32K tokens: throughput over {system}, largest",
            "AdaPtis Fig. 9, §5.3, §1, abstract",
            f"{figure} times",
            (Found("figure-9", f"over {system}", how="most"),),
            "at least",
            "At 32K tokens it is {last}: the head no longer counts, and equal stages suffice. Over the paper's "
            "generator, written again, it is {own} at least." + idle.get(system, ""),
            "times",
            {
                "last": Found("figure-9", f"over {system}", ("32768",)),
                "own": Found("figure-9", "over AdaPtis", how="least", table="Our speedup"),
            },
            speedup=True,
        )
        for system, figure in paper.items()
    )


def _figure_10() -> tuple[Claim, ...]:
    paper = {
        "baseline": (76, 73, 75),
        "+1": (72, 75, 63),
        "+2": (78, 74, 76),
        "+3": (88, 84, 84),
        "+1+2": (92, 89, 70),
        "+1+3": (95, 95, 92),
        "+2+3": (96, 91, 92),
    }
    phases = {"1": "placement", "2": "schedule", "3": "partition"}
    claims = []
    for name, shares in paper.items():
        words = " and ".join(phases[digit] for digit in name if digit in phases) or "nothing"
        claims.append(
            Claim(
                f"figure-10-{name.replace('+', '') or 'none'}",
                f"Tuned {words}: share of the whole's throughput on Gemma, DeepSeek, Nemotron-H",
                "AdaPtis Fig. 10, §5.4",
                f"{', '.join(map(str, shares))} %",
                tuple(Found("figure-10", family, (name,), _OWN_GENERATOR) for family in _HETEROGENEOUS),
                "near",
                "The paper's generator, written again. Size and microbatches are not stated.",
                "%",
                of="written again",
            )
        )
    return tuple(claims)


def _figure_12() -> tuple[Claim, ...]:
    paper = {"AdaPtis": "4.42", "I-1F1B": "4.55", "ZB": "2.12", "Mist": "6.57"}
    return tuple(
        Claim(
            f"figure-12-{system.lower()}",
            f"Predicted throughput of {system}, largest error",
            "AdaPtis Fig. 12, §5.5",
            f"{error} %",
            (Found("figure-12", "error", (("Small", "Medium", "Large"), system), how="most"),),
            "at most",
            _SLEEP,
            "%",
            incomparable=True,
        )
        for system, error in paper.items()
    )


def _scaling(number: int, kind: str, paper: str, grown: str) -> tuple[Claim, ...]:
    part, table = f"figure-{number}", "nemotron-h-large"
    return (
        Claim(
            f"{part}-gains",
            f"{kind} scaling, 8 to 128 GPUs: throughput over S-1F1B",
            f"AdaPtis Fig. {number}, §5.7",
            f"{paper} times",
            tuple(Found(part, "ours", (devices,), table) for devices in _DEVICES),
            "at least",
            _GRID,
            "times",
            speedup=True,
            incomparable=True,
        ),
        Claim(
            f"{part}-grows",
            f"{kind} scaling, from 8 to 128 GPUs: throughput grows to",
            f"AdaPtis §5.7, Fig. {number}",
            f"{grown} times",
            (Found(part, "our throughput over 8 devices", ("128",), table),),
            "at least",
            _GRID,
            "times",
            incomparable=True,
        ),
        Claim(
            f"{part}-highest",
            f"{kind} scaling: the highest throughput in every configuration",
            f"AdaPtis §5.7, Fig. {number}",
            "above 1.00 times",
            (Found(part, "ours over the best of eight", how="least"),),
            "at least",
            "Pipeloom over the fastest of eight systems, each on the best of its own grid: the least of two models. "
            "The paper's own generator, written again, is none of the eight: over it Pipeloom has {own} at least.",
            "times",
            {"own": Found(part, "ours over AdaPtis", how="least")},
            speedup=True,
        ),
    )


_MOTIVATION = (
    Claim(
        "figure-1-heterogeneous",
        "Heterogeneous models have larger bubbles than LLaMA-2 (S-1F1B)",
        "AdaPtis Fig. 1, §1, §3.1",
        "larger",
        (Found("figure-1", "S-1F1B", ("LLaMA-2",)), Found("figure-1", "S-1F1B", (_HETEROGENEOUS,), how="least")),
        "rises",
        "LLaMA-2, and the least of the others.",
        "%",
        of="written again",
    ),
    Claim(
        "figure-1-interleaved",
        "On Nemotron-H I-1F1B has larger bubbles than S-1F1B",
        "AdaPtis Fig. 1, §1",
        "larger",
        (Found("figure-1", "S-1F1B", ("Nemotron-H",)), Found("figure-1", "I-1F1B", ("Nemotron-H",))),
        "rises",
        "I-1F1B has the number of chunks that suits it best here.",
        "%",
        of="written again",
    ),
    *(
        Claim(
            f"figure-3-{step}",
            f"Gemma: with {words} tuned, over S-1F1B",
            "AdaPtis Fig. 3, §3.2",
            f"{figure} times",
            (Found("figure-3", "ours", (f"+ {step}",)),),
            "at least",
            "Pipeloom's; the paper's generator, written again, has {generator}.",
            "times",
            {"generator": Found("figure-3", "AdaPtis", (f"+ {step}",))},
            speedup=True,
        )
        for step, words, figure in (
            ("schedule", "the schedule", "1.28"),
            ("partition", "the partition too", "1.49"),
            ("placement", "the placement too", "1.74"),
        )
    ),
    Claim(
        "figure-4",
        "The search space: digits of the numbers of partitions, placements and schedules",
        "AdaPtis Fig. 4, §3.3",
        "23, 109, 100 digits",
        (
            Found("figure-4", "partitions", how="most", table="log10 of the cases"),
            Found("figure-4", "placements", how="most", table="log10 of the cases"),
            Found("figure-4", "orders", ("30",), "log10 of the orders"),
        ),
        "near",
        "The paper does not say how it counts; its figures are the ends of its curves.",
        "digits",
        of="setting",
    ),
)

_THROUGHPUT = (
    Claim(
        "figure-8-superior",
        "The highest throughput for all models and sizes",
        "AdaPtis §5.2, Fig. 8",
        "above 1.00 times",
        (Found("figure-8", "ours over the best of eight", how="least"),),
        "at least",
        "Pipeloom over the fastest of eight systems that fits, the least of all models on the P that suits each; of "
        "all models on every P {every}. The paper's own generator, written again, is none of the eight: over it "
        "Pipeloom has {own} at least.",
        "times",
        {
            "own": over_mist("over AdaPtis, least", "all"),
            "every": Found("figure-8-depths", "ours over the best of eight", how="least", table="Throughput over"),
        },
        speedup=True,
    ),
    Claim(
        "figure-8-range",
        "Throughput is higher by, least and most",
        "AdaPtis §5.2",
        "1.11 to 1.59 times",
        (
            Found("figure-8", "ours over the best of eight", how="least"),
            Found("figure-8", "ours", how="most", table="Throughput over S-1F1B"),
        ),
        "at least",
        "Of all cases the least over the best of eight systems, the most over S-1F1B. The paper states neither P nor "
        "microbatches, and does not say over which system; two microbatches a rank flatter the most.",
        "times",
        speedup=True,
        incomparable=True,
    ),
    Claim(
        "figure-8-zb",
        "ZB gains only marginally over S-1F1B",
        "AdaPtis §5.2",
        "1.02 times",
        (Found("figure-8", "ZB", how="mean", table="Throughput over S-1F1B"),),
        "near",
        f"{_UNSTATED} The fewer they are, the more there is to fill: with four a rank alone {{four}}. ZB here is H1 or "
        "greedy order, whichever is faster.",
        "times",
        {"four": Found("figure-8", "ZB", how="mean", table="Throughput over S-1F1B, 4 microbatches")},
        speedup=True,
        of="written again",
        incomparable=True,
    ),
    Claim(
        "figure-8-interleaved",
        "I-1F1B loses throughput on Nemotron-H large",
        "AdaPtis §5.2",
        "0.78 times",
        (Found("figure-8", "I-1F1B", ("Nemotron-H Large",), "Throughput over S-1F1B", "least"),),
        "near",
        "It has the number of chunks that suits it best here, and never falls behind S-1F1B by so much.",
        "times",
        speedup=True,
        of="written again",
    ),
    Claim(
        "figure-9-mist-average",
        "Sequences of 1K to 32K tokens: throughput over Mist, average",
        "AdaPtis §5.3",
        "1.15 times",
        (Found("figure-9", "over Mist", how="mean"),),
        "at least",
        "With P = 8 and 64 microbatches, as the paper has them, Mist's partition leaves little.",
        "times",
        speedup=True,
    ),
    Claim(
        "figure-9-grows",
        "Gains over S-1F1B grow from 1K to 32K tokens",
        "AdaPtis §5.3",
        "grow",
        tuple(Found("figure-9", "over S-1F1B", (str(1024 << i),)) for i in range(6)),
        "rises",
        "They grow to 4K; beyond it the layers grow and the head does not, so that equal stages suffice. Over Mist "
        "they fall, from {first} to {last}.",
        "times",
        {"first": Found("figure-9", "over Mist", ("1024",)), "last": Found("figure-9", "over Mist", ("32768",))},
    ),
    Claim(
        "figure-10-placement",
        "Placement alone slows Nemotron-H down",
        "AdaPtis §5.4, Fig. 10",
        "slower",
        tuple(Found("figure-10", "Nemotron-H", (name,), _OWN_GENERATOR) for name in ("+1", "baseline")),
        "rises",
        "Share of the whole's throughput, with placement tuned and with nothing: chunks are as many as suit. The "
        "paper's generator, written again.",
        "%",
        of="written again",
    ),
    Claim(
        "figure-11-bubbles",
        "Bubbles shrink from S-1F1B to Mist to AdaPtis",
        "AdaPtis Fig. 11, §5.4",
        "shrink",
        tuple(Found("figure-11", "bubbles", (name,)) for name in ("AdaPtis", "Mist", "S-1F1B")),
        "rises",
        "AdaPtis, Mist, S-1F1B; the generator is the paper's, written again.",
        "%",
        of="written again",
    ),
    Claim(
        "figure-11-real",
        "Simulated traces match real ones",
        "AdaPtis Fig. 11, §5.5",
        "match",
        (),
        "says",
        "Needs 32 GPUs (P = 8, T = 4). Nearest is `make gpu`, which compares a small model's iteration on one GPU with "
        "its plan, and no traces.",
        command="make gpu",
    ),
)

_PERFORMANCE_MODEL = (
    Claim(
        "figure-12-average",
        "Predicted throughput, average error",
        "AdaPtis Fig. 12, §5.5",
        "2.12 %",
        (Found("figure-12", "error", how="mean"),),
        "at most",
        _SLEEP,
        "%",
        incomparable=True,
    ),
    *_figure_12(),
    Claim(
        "figure-13-generation",
        "Generating a pipeline of 256 microbatches takes, for S, M, L",
        "AdaPtis Fig. 13, §5.6",
        "100, 100, 100 s",
        tuple(Found("figure-13", "ours", (f"{size}, 256",), "Generation time") for size in "SML"),
        "at most",
        "Pipeloom's ends after a number of placements, whatever it has found; processor time. The paper's generator, "
        "written again, takes {generator} s at most.",
        "s",
        {"generator": Found("figure-13", "AdaPtis", how="most", table="Generation time")},
        incomparable=True,
    ),
    Claim(
        "figure-13-simple",
        "An integer program for the schedule alone takes exponentially long",
        "AdaPtis Fig. 13, §5.6",
        "grows exponentially",
        tuple(
            Found("figure-13", "processor time", (f"S, P = 2, {n} microbatches",), "Integer program") for n in "2345"
        ),
        "rises",
        "HiGHS on one fixed partition and placement, with two, three, four and five microbatches, where it is cut; "
        "larger ones are extrapolated. That it grows is judged, not how fast.",
        "s",
        of="written again",
    ),
    Claim(
        "figure-13-simple-sizes",
        "The same for S, M and L on their pipelines: how the largest case that was tried ends",
        "AdaPtis Fig. 13, §5.6",
        "cut",
        _last_result("the schedule alone"),
        "says",
        "HiGHS on equal stages, P = 4, 8, 8, cut after a quarter of the solvers' seconds, at {s}, {m} and {l} "
        "microbatches. Fewer are solved; the page has them all.",
        also=_last_number("the schedule alone"),
        of="written again",
        incomparable=True,
    ),
    Claim(
        "figure-13-whole",
        "An integer program for partition and placement too takes longer still, for S, M, L: how the largest case that "
        "was tried ends",
        "AdaPtis Fig. 13, §5.6",
        "cut",
        _last_result("partition and placement too"),
        "says",
        "HiGHS, at {s}, {m} and {l} microbatches; one leaves nothing to order. The paper solves small cases within "
        "10^5 s and extrapolates the others.",
        also=_last_number("partition and placement too"),
        of="written again",
        incomparable=True,
    ),
)

CLAIMS: tuple[Claim, ...] = (
    *_figure_1(),
    *_MOTIVATION,
    *_figure_8(),
    *_depths(),
    *_THROUGHPUT[:4],
    *_figure_9(),
    *_THROUGHPUT[4:6],
    *_figure_10(),
    *_THROUGHPUT[6:],
    *_PERFORMANCE_MODEL,
    *_scaling(14, "Strong", "1.22, 1.35, 1.43, 1.41, 1.47", "5.34"),
    Claim(
        "figure-14-mist",
        "Strong scaling, from 8 to 128 GPUs: Mist's throughput grows to",
        "AdaPtis §5.7",
        "5.14 times",
        (),
        "near",
        "Not recorded: the table has Pipeloom's growth alone. That of Mist hangs on the same grid.",
        "times",
        of="written again",
        command="pipeloom reproduce adaptis figure-14",
    ),
    *_scaling(15, "Weak", "1.22, 1.33, 1.33, 1.40, 1.26", "5.19"),
)

OWN: tuple[OwnFigure, ...] = (
    OwnFigure(
        "over-generator",
        "P = 4, 8, 16 and all: throughput over the paper's own generator, average",
        tuple(over_mist("over AdaPtis, average", pipeline) for pipeline in (*PIPELINES, "all")),
        "times",
    ),
    OwnFigure(
        "generator-over-bound",
        "The same of that generator over the lower bound of all placements, which is the most that there is to gain",
        tuple(over_mist("AdaPtis over the lower bound", pipeline) for pipeline in (*PIPELINES, "all")),
        "times",
    ),
)
