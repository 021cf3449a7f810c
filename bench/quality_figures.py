"""Tables of quality: KL and scores, by text and by method of choosing rows."""

import json
import math
import statistics

from bench.records import RESULTS, Case, measured, only
from bench.selector_cases import selector_cases

QUALITY, LARGER, CODED = "quality.json", "quality-larger.json", "codecs-models.json"
TEXTS = {
    ("novel", 7680): "novel, 8K", ("speech", 6441): "speech, 6K", ("code", 7680): "Python, 8K",
    ("spanish", 7680): "Spanish, 8K", ("dialogue", 7680): "dialogue, 8K", ("decimal", 32512): "Python, 32K",
    ("decimal", 60752): "Python, 59K", ("manual", 32512): "manual, 32K", ("manual", 119256): "manual, 116K",
}  # fmt: skip
CONTENDERS = (  # a row's name, the contender, its bytes a key on the device, the share of rows (0: all)
    ("exact Top-K, reads every key", "exact", "128", 0.02),
    ("**csattn, `default`**", "default", "**16 + 2**", 0.02),
    ("csattn, chosen a layer ahead", "default+ahead", "16 + 2", 0.02),
    ("csattn, `default` at 5 % (× exact's at 5 %)", "default", "16 + 2", 0.05),
    ("csattn, `lists` (corrected Top-L lists)", "lists", "645", 0.02),
    ("all rows, KIVI's 4 bits", "KIVI, 4 bits", "80", 0.0),
    ("all rows, TurboQuant's 4 bits", "TurboQuant, 4 bits", "68", 0.0),
    ("all rows, llama.cpp's q4_0", "q4_0", "72", 0.0),
)
LARGER_MODELS = {"qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B", "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B"}
CODED_MODELS = {"smollm2-135m-instruct": "SmolLM2-135M", "gemma-3-270m": "Gemma-3-270M"} | LARGER_MODELS
LM_EVAL_MODELS = LARGER_MODELS | {"smollm2-135m": "SmolLM2-135M"}
LARGER_CONTENDERS = {  # a row's contender, and the share of rows (0: all): its name
    ("exact", 0.02): "exact Top-K, reads every key",
    ("default", 0.02): "**csattn, `default`**",
    ("default+ahead", 0.02): "csattn, chosen a layer ahead",
    ("default", 0.05): "csattn, `default` at 5 % (× exact's at 5 %)",
    ("lists", 0.02): "csattn, `lists`",
    ("paper", 0.02): "csattn, `paper`",
    ("magicpig-300", 0.0): "MagicPIG, K = 10, L = 300",
    ("pqcache, 16 bytes", 0.02): "PQCache of 16 bytes",
    ("sparq", 0.02): "SparQ",
    ("quest", 0.02): "Quest",
    ("h2o", 0.02): "H2O",
    ("window", 0.0): "sinks and window alone",
    ("KIVI, 4 bits", 0.0): "all rows, KIVI's 4 bits",
    ("KIVI, 2 bits", 0.0): "all rows, KIVI's 2 bits",
    ("TurboQuant, 4 bits", 0.0): "all rows, TurboQuant's 4 bits",
    ("q4_0", 0.0): "all rows, llama.cpp's q4_0",
}
MEANS = (
    ("exact Top-K, the others dropped", "128", ("exact",)),
    ("**`default`**", "18", ("default",)),
    ("`default`, chosen a layer ahead", "18", ("default+ahead",)),
    ("`default`, the rest by moments; dropped", "18", ("default+rest=moments", "default+rest=none")),
    (
        "a sketch of 8; 12; 24 bytes a key",
        "9; 14; 27",
        tuple(f"sketch of {n} words" for n in ("2 + 0", "2 + 1", "4 + 2")),
    ),
    ("`lists`", "646", ("lists",)),
)
SELECTORS = {  # contenders of `bench.accuracy selectors`: names
    "exact": "exact Top-K, the others dropped",
    "default": "**csattn, `default`**",
    "pqcache": "PQCache",
    "lists": "csattn, `lists`",
    "magicpig": "MagicPIG, K = 10, L = 150",
    "sparq": "SparQ",
    "quest": "Quest",
    "h2o": "H2O",
    "window": "StreamingLLM: sinks and window alone",
}
FINDERS = "full", "default", "exact"
LM_EVAL = (
    "In `python -m bench.lm_eval`, an unmodified [lm-eval](https://github.com/EleutherAI/lm-evaluation-harness) asks "
    "the service RULER's questions, the same ones with each selection. The difference from full attention, sample by "
    "sample, is in brackets. Each model fails some questions whatever it attends to, and the small one fails most. "
    "Tasks that count over the whole context (cwe, fwe) lose first where rows are dropped.",
)


def kl_range(contender: str) -> str:
    """Return the range of KL to full attention at 2 % on the real texts."""
    values = [case["kl"] for case in on_texts(contender)]
    return f"{min(values):.4f} to {max(values):.4f}"


def larger_range(contender: str) -> str:
    """Return the same range for the largest real model."""
    model = next(iter(LARGER_MODELS))
    of = model, contender, 0.02
    values = [c["kl"] for c in measured(LARGER) if (c["model"], c["contender"], c["keep"]) == of]
    return f"{min(values):.4f} to {max(values):.4f}"


def on_texts(contender: str, keep: float = 0.02) -> list[Case]:
    """Return the case of each real text and length; the text continues itself."""
    of = {"contender": contender, "keep": keep}
    return [only(QUALITY, text=text, context_len=context_len, **of) for text, context_len in TEXTS]


def quality() -> list[str]:
    """Return a table of KL by text, with its ratio to exact Top-K's, and of full attention over low-bit KV."""
    head = "| KL at 2 % (× exact) | bytes a key on the device, without rows | " + " | ".join(TEXTS.values()) + " |"
    lines = [head, "|---|---:|" + "---:|" * len(TEXTS)]
    for name, contender, num_bytes, keep in CONTENDERS:
        cells = [kl_cell(case, is_bold="**" in name) for case in on_texts(contender, keep)]
        lines.append(f"| {name} | {num_bytes} | {' | '.join(cells)} |")
    return lines


def quality_larger() -> list[str]:
    """Return tables of KL by text and length, one for each model larger than the demo's; – where not measured."""
    lines: list[str] = []
    for model, model_name in LARGER_MODELS.items():
        cases = [case for case in measured(LARGER) if case["model"] == model]
        columns = list(dict.fromkeys((case["text"], case["context_len"]) for case in cases))
        longest = max(context_len for _, context_len in columns)
        titles = [
            f"{next(name for (known, _), name in TEXTS.items() if known == text).split(',')[0]}, {length / 1024:.0f}K"
            for text, length in columns
        ]
        lines += [
            *([""] if lines else []),
            f"| {model_name}: KL at 2 % (× exact) | bytes a key on the device, without rows | {' | '.join(titles)} |",
            "|---|---:|" + "---:|" * len(columns),
        ]
        for (contender, keep), name in LARGER_CONTENDERS.items():
            of = {(c["text"], c["context_len"]): c for c in cases if (c["contender"], c["keep"]) == (contender, keep)}
            if of:
                held = [f"{c['device_bytes_per_key']:.0f}" for c in of.values() if c["context_len"] == longest]
                cells = [kl_cell(of[column], "**" in name) if column in of else "–" for column in columns]
                lines.append(f"| {name} | {' | '.join([held[0] if held else '–', *cells])} |")
    return lines


def quality_odd() -> list[str]:
    """Return a table of KL on texts whose lines are alike, from `default`'s worst ratio to exact Top-K to its best."""
    cases = measured("quality-odd.json")
    kl = {(case["text"], case["contender"], case["keep"]): case["kl"] for case in cases}
    keeps = sorted({case["keep"] for case in cases})
    times = {(text, keep): kl[text, "default", keep] / kl[text, "exact", keep] for text, _, keep in kl}
    texts = sorted({case["text"] for case in cases}, key=lambda text: -times[text, 0.02])
    lines = [
        "| KL of `default` (× exact Top-K's) | " + " | ".join(f"{100 * keep:g} %" for keep in keeps) + " |",
        "|---|" + "---:|" * len(keeps),
    ]
    for text in texts:
        cells = [f"{kl[text, 'default', keep]:.4f} ({ratio(times[text, keep])})" for keep in keeps]
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return lines


def quality_gemma() -> list[str]:
    """Return a sentence with the KL, by `csattn eval`, of a model most of whose layers only see a window."""
    cases = measured("eval-gemma-3-270m.json")
    texts = list(dict.fromkeys(case["text"] for case in cases))
    kl = {(case["text"], case["chosen_by"]): case["kl"] for case in cases}
    kl_cells = {
        name: ", ".join(f"{kl[text, name]:.4f} ({ratio(kl[text, name] / kl[text, 'exact'])})" for text in texts)
        for name in ("default", "lists")
    }
    return [
        "Three of Gemma-3-270M's 18 layers see everything, the others 512 rows. By `csattn eval` "
        f"({', '.join(texts)}; {cases[0]['context_len']} tokens, and the {cases[0]['eval_len']} after them), its KL at "
        f"2 % (× exact Top-K's) is {kl_cells['default']} with `default`, and {kl_cells['lists']} with `lists`."
    ]


def quality_coded() -> list[str]:
    """Return a table of KL over contexts in fewer bytes, by model, with the error of their keys."""
    cases = measured(CODED)
    formats = [name for name in dict.fromkeys(c["format"] for c in cases) if name != "as built"]
    lines = [
        "| KL, all rows; `default` at 2 % (key error) | as built | "
        + " | ".join(f"`{name}`" for name in formats)
        + " |",
        "|---|---:|" + "---:|" * len(formats),
    ]
    for model, model_name in CODED_MODELS.items():
        of = {(c["selector"], c["format"]): c for c in cases if c["model"] == model}
        cells = [f"–; {of['csattn', 'as built']['kl']:.4f}"]
        for name in formats:
            full, default = of["full", name], of["csattn", name]
            cells.append(f"{full['kl']:.4f}; {default['kl']:.4f} ({full['key_error']:.2f})")
        lines.append(f"| {model_name} | {' | '.join(cells)} |")
    return lines


def kl_cell(of: Case, is_bold: bool) -> str:
    times = "" if of["times_exact"] is None else f" ({ratio(of['times_exact'])})"
    return f"**{of['kl']:.4f}{times}**" if is_bold else f"{of['kl']:.4f}{times}"


def ratio(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"


def quality_means() -> list[str]:
    """Return a table of ratios to exact Top-K's KL: geometric means over the texts and lengths."""
    lines = [
        "| at 2 % of the rows | bytes a key on the device, without rows | × the KL of exact Top-K, geometric mean |",
        "|---|---:|---:|",
    ]
    for name, num_bytes, contenders in MEANS:
        of = "; ".join(geometric_mean([c["times_exact"] for c in on_texts(c)]) for c in contenders)
        lines.append(f"| {name} | {num_bytes} | {'**' + of + '**' if '**' in name else of} |")
    return lines


def geometric_mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "1"  # exact Top-K itself has no ratio
    return ratio(statistics.geometric_mean(known))


def lm_eval() -> list[str]:
    """Return tables, one for each model, of scores by task and length, and their differences from full attention."""
    files = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("lm-eval-*.json"))]
    lines = list(LM_EVAL)
    for model, name in LM_EVAL_MODELS.items():
        if cases := [case for file in files if file["model"] == model for case in file["cases"]]:
            lines += ["", *score_table(name, cases)]
    return lines


def ruler() -> list[str]:
    """Return a table of the larger model's RULER scores with contexts of 8K and 32K tokens."""
    cases = [case for name in ("8k", "32k") for case in measured(f"lm-eval-1.5b-{name}-h200.json")]
    scores = {(case["task"], case["length"], case["variant"]): case["score"] for case in cases}
    lines = [
        "| [RULER's scores](docs/quality.md#rulers-questions) by lm-eval, Qwen2.5-Coder-1.5B, 8K (50 samples);"
        " 32K (20 to 30) | full attention | csattn, 2 % | exact Top-K, 2 % |",
        "|---|---:|---:|---:|",
    ]
    for task, what in (
        ("niah_multikey_2", "one of many keys alike"),
        ("ruler_vt", "chains of names"),
        ("ruler_fwe", "the most frequent words"),
    ):
        cells = [
            "; ".join(f"{scores[task, length, variant]:.2f}" for length in (8192, 32768))
            for variant in ("full attention", "default, 2%", "exact Top-K, 2%")
        ]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return lines


def score_table(model_name: str, cases: list[Case]) -> list[str]:
    most: dict[tuple[str, int], int] = {}  # samples; if two runs have a task, those of the larger run
    for case in cases:
        of = case["task"], case["length"]
        most[of] = max(most.get(of, 0), case["samples"])
    cases = [case for case in cases if case["samples"] == most[case["task"], case["length"]]]
    names = list(dict.fromkeys(case["variant"] for case in cases))
    lines = [f"| {model_name} | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for of in sorted(most, key=lambda of: of[1]):
        row = {case["variant"]: case for case in cases if (case["task"], case["length"]) == of}
        cells = [score_cell(row[name]) if name in row else "–" for name in names]
        lines.append(f"| {of[0]}, {of[1] // 1024}K, {most[of]} samples | {' | '.join(cells)} |")
    return lines


def rest_mass() -> list[str]:
    """Return sentences on how the codes estimate the attention mass of rows that are not chosen, over the texts."""
    cases = measured("rest.json")
    [(context_len, keep)] = {(case["context_len"], case["keep"]) for case in cases}
    medians = [100 - 100 * math.exp(case["median"]) for case in cases]
    below = [100 * case["below"] for case in cases]
    return [
        "Codes underestimate the total weight of the rows that are not chosen for "
        f"{min(below):.0f} to {max(below):.0f} % of the queries of all heads; the median is {min(medians):.0f} to "
        f"{max(medians):.0f} % too low ({', '.join(case['text'] for case in cases)}; {context_len} tokens, "
        f"{100 * keep:g} % chosen; `python -m bench.accuracy rest`). "
        "[A correction made KL worse](../bench/log.md#what-won-and-what-lost)."
    ]


def needles() -> list[str]:
    """Return a table of passkeys found, by length and depth, by full attention, `default` and exact Top-K."""
    cases = measured("needles-h200.json")
    depths = sorted({case["depth"] for case in cases})
    lines = [
        "| passkeys found by full attention, `default`, exact Top-K | asked at each depth | "
        + " | ".join(f"depth {depth:g}" for depth in depths)
        + " |",
        "|---|---:|" + "---:|" * len(depths),
    ]
    for length, stretch in sorted({(case["length"], case["stretch"]) for case in cases}):
        of_length = [case for case in cases if case["length"] == length]
        asked = len({case["sample"] for case in of_length})
        cells = [", ".join(f"{found(of_length, method, depth)}" for method in FINDERS) for depth in depths]
        lines.append(f"| {length / 1024:.0f}K (× {stretch:g}) | {asked} | {' | '.join(cells)} |")
    return lines


def found(cases: list[Case], contender: str, depth: float) -> int:
    return round(sum(case["score"] for case in cases if (case["contender"], case["depth"]) == (contender, depth)))


def score_cell(of: Case) -> str:
    """Return full attention's score with its standard error, or a score with its difference from full attention's.

    The difference is taken sample by sample, and has its own standard error.
    """
    if of["variant"] == "full attention":
        return f"{of['score']:.2f} ± {of['stderr']:.2f}"
    return f"{of['score']:.2f} ({of['difference']:+.2f} ± {of['difference_stderr']:.2f})"


def selectors() -> list[str]:
    """Return a table of other ways to choose rows: KL (geometric means over texts), and the bytes held and read."""
    lines = [
        "| | KL at 2 % (× exact) | KL at 5 % (× exact) | bytes a key and KV head to choose by "
        "| MB a token reads to choose | for the rest | and fetches, at 2 % |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for contender, name in SELECTORS.items():
        kls = [f"{selectors_kl(contender, keep):.4f} ({selectors_times(contender, keep)})" for keep in (0.02, 0.05)]
        of = selectors_of(contender, 0.02)
        index, *read = (
            statistics.fmean(c[field] for c in of)
            for field in ("index_bytes_per_key", *(f"{what}_bytes_per_step" for what in ("search", "rest", "moved")))
        )
        cells = [*kls, f"{index:.0f}", *(f"{num_bytes / 1e6:.1f}" for num_bytes in read)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def selectors_kl(contender: str, keep: float) -> float:
    return statistics.geometric_mean(c["kl"] for c in selectors_of(contender, keep))


def selectors_of(contender: str, keep: float) -> list[Case]:
    cases = selector_cases(RESULTS / "selectors.json")
    return [c for c in cases if c["contender"] == contender and c["keep"] == keep]


def selectors_times(contender: str, keep: float) -> str:
    return ratio(selectors_kl(contender, keep) / selectors_kl("exact", keep))
