"""Generates the table of docs/models.md and the README's list of models from what `test_families` tests.

python -m tests.workers.families_table           writes them between their markers
python -m tests.workers.families_table --check   exits with 1 if one of them is out of date
"""

import sys
from pathlib import Path

from csattn.models.description import describe
from csattn.models.families import FAMILIES
from csattn.models.recurrent_spec import ConvSpec, DeltaSpec, ScanSpec
from csattn.models.spec import AttentionSpec, LayerSpec, ModelSpec
from tests.tiny import ALL_FAMILIES, tiny_config

ROOT = Path(__file__).parents[2]
# by family: the name that users know
TITLES = {
    "afmoe": "Arcee Trinity",
    "arcee": "Arcee",
    "cohere": "Command R",
    "cohere2": "Command R7B, Command A",
    "cohere2_moe": "Command A+",
    "cwm": "CWM",
    "deepseek_v3": "DeepSeek-V3, R1, V3.1",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE 4.5",
    "ernie4_5_moe": "ERNIE 4.5 MoE",
    "exaone": "EXAONE 3, 3.5",
    "exaone4": "EXAONE 4",
    "exaone_moe": "K-EXAONE",
    "flex_olmo": "FlexOlmo",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma4_text": "Gemma 4 31B",
    "gemma4_text, experts": "Gemma 4 26B-A4B",
    "gemma4_text, inputs": "Gemma 4 E2B, E4B",
    "glm": "GLM-4 (2024)",
    "glm4": "GLM-4 (2025)",
    "glm4_moe": "GLM-4.5, 4.6",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm_moe_dsa": "GLM-5",
    "gpt_oss": "gpt-oss",
    "granite": "Granite",
    "granite_swa": "Granite Swash 2B",
    "granitemoe": "Granite 3 MoE",
    "granitemoe_swa": "Granite Swash 3B-A600M",
    "granitemoehybrid": "Granite 4 H MoE",
    "granitemoehybrid, dense": "Granite 4 H dense, Granite 4",
    "granitemoeshared": "Granite MoE with shared experts",
    "helium": "Helium",
    "hunyuan_v1_dense": "Hunyuan 0.5B to 7B",
    "hunyuan_v1_moe": "Hunyuan A13B",
    "hy_v3": "Hy3",
    "hyperclovax": "HyperCLOVA X SEED",
    "internlm3": "InternLM3",
    "iquestcoder": "IQuest-Coder",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2 MoE",
    "llama": "Llama 2, 3",
    "llama4_text": "Llama 4",
    "mellum": "Mellum 2",
    "minimax_m2": "MiniMax-M2",
    "ministral": "Ministral 8B",
    "ministral3": "Ministral 3",
    "mistral": "Mistral",
    "mistral4": "Mistral Small 4",
    "mixtral": "Mixtral",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2, 3 Nano",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "phi3": "Phi-3, Phi-4",
    "qwen2": "Qwen2, 2.5",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_5_moe_text": "Qwen3.5-MoE",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_next": "Qwen3-Next",
    "sarvam_moe": "Sarvam 30B",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "solar_open": "Solar Open",
    "youtu": "Youtu-LLM",
}


def main() -> int:
    tested = {tiny_config(name).model_type for name in ALL_FAMILIES}
    assert TITLES.keys() == ALL_FAMILIES.keys() and tested == FAMILIES.keys(), "some are not tested, or have no name"
    stale = []
    for name, made in (("docs/models.md", table()), ("README.md", ", ".join(TITLES.values()))):
        path = ROOT / name
        text = path.read_text()
        before, _, rest = text.partition("<!-- models -->")
        new = f"{before}<!-- models -->{made}<!-- /models -->{rest.partition('<!-- /models -->')[2]}"
        if new != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(new)
    if stale and "--check" in sys.argv:
        print(f"not what is tested: {', '.join(stale)}; run python -m tests.workers.families_table", file=sys.stderr)
        return 1
    return 0


def table() -> str:
    lines = ["", "| Models | `model_type` | Attention | MLP |", "|---|---|---|---|"]
    for name, title in TITLES.items():
        config = tiny_config(name)
        spec = describe(config)
        lines.append(f"| {title} | `{config.model_type}` | {attention(spec)} | {mlps(spec)} |")
    return "\n".join([*lines, ""])


def attention(spec: ModelSpec) -> str:
    kinds = [layer.attention for layer in spec.layers if layer.recurrent is None]
    latents = [layer.latent for layer in spec.layers if layer.latent is not None]
    said = {
        "MLA over all latents": any(latent.top_k is None for latent in latents),
        "MLA over latents that its own indexer chooses": any(latent.indexer is not None for latent in latents),
        "some layers reuse the choice of an earlier one": any(
            x.top_k is not None and x.indexer is None for x in latents
        ),
        "sliding windows and compressed rows": bool(spec.compressed),
        "which its own indexer chooses in some layers": any(of.indexer is not None for of in spec.compressed),
        "several residual streams": spec.streams is not None,
        "sliding windows": any(kind.reach is not None and not kind.reach.chunked for kind in kinds),
        "chunked": any(kind.reach is not None and kind.reach.chunked for kind in kinds),
        "heads of two widths": spec.local_heads is not None,
        "some layers share the KV of another": bool(spec.kv_sources),
        "attention sinks (logits)": any(kind.sinks for kind in kinds),
        "capped logits": any(kind.logit_cap is not None for kind in kinds),
        "no RoPE": not any(rope.parameters is not None for rope in spec.ropes),
        "no RoPE in some layers": len({is_unrotated(spec, kind) for kind in kinds}) > 1,
        "a RoPE for each layer type": sum(rope.parameters is not None for rope in spec.ropes) > 1,
        "gated output": any(kind.gated for kind in kinds),
        "linear attention (gated delta rule)": any(isinstance(layer.recurrent, DeltaSpec) for layer in spec.layers),
        "state spaces (Mamba-2)": any(isinstance(layer.recurrent, ScanSpec) for layer in spec.layers),
        "short convolutions": any(isinstance(layer.recurrent, ConvSpec) for layer in spec.layers),
        "queries scaled by position": any(rope.temper is not None for rope in spec.ropes),
    }
    return ", ".join(what for what, is_so in said.items() if is_so) or "full"


def is_unrotated(spec: ModelSpec, kind: AttentionSpec) -> bool:
    return kind.rope is None or spec.ropes[kind.rope].parameters is None


def mlps(spec: ModelSpec) -> str:
    kinds = {of_layer(layer) for layer in spec.layers}
    return " and ".join(sorted(kinds)) + (", parallel to attention" if spec.layers[0].parallel else "")


def of_layer(layer: LayerSpec) -> str:
    if not layer.experts:
        return "dense"
    if layer.experts[0].has_own_norms:
        return "dense parallel to experts"
    return "experts, one shared" if len(layer.experts) > 1 or layer.mlp is not None else "experts"


if __name__ == "__main__":
    sys.exit(main())
