"""Every table of README.md and docs/: its columns and its records."""

from collections.abc import Mapping

from experiments.tables.columns import (
    Cell,
    bias,
    bias_or_kind,
    mib,
    name,
    name_of_codec,
    needed,
    number,
    of,
    ratio,
    text,
)
from experiments.tables.pages import Source, Table
from experiments.tables.rows import (
    Row,
    adapters,
    audits,
    budgets,
    compile_times,
    distances,
    faults,
    features,
    fitted,
    heads,
    instructions_of,
    kinds_of_kernels,
    largest_batches,
    networks,
    noise,
    operations,
    products,
    seeds,
    subspaces,
    texts,
    trained,
)

Columns = Mapping[str, Cell]

TIME = number("step_time_ratio", 1, ".2f")  # as the turns of the rows were paired
NEEDS: Columns = {"row": name, "needs, MiB": needed}
TRAFFIC: Columns = {"HBM traffic / plain": ratio("hbm_traffic_bytes")}
ESTIMATE: Columns = {"estimated time / plain": ratio("estimated_seconds")}
STEP: Columns = {**NEEDS, **TRAFFIC, **ESTIMATE}
CYCLES: Columns = {**NEEDS, **TRAFFIC, "estimated cycles / plain": ratio("estimated_cycles")}
TEMP: Columns = {"row": name, "temp, MiB": mib("temp_bytes"), **TRAFFIC, **ESTIMATE}
PEAK: Columns = {
    "row": name,
    "peak, MiB": mib("peak_bytes"),
    "needs, MiB": needed,
    **TRAFFIC,
    **ESTIMATE,
}
FLOPS: Columns = {**NEEDS, **TRAFFIC, "TFLOP": number("flops", 1e12, ".2f")}
NETWORK: Columns = {
    "network": text("network"),
    "row": name,
    "needs, MiB": needed,
    "activations / plain": ratio("activation_bytes"),
    **TRAFFIC,
    **ESTIMATE,
}
CODE: Columns = {
    "code": text("network"),
    "row": name,
    "needs, MiB": needed,
    "HBM traffic, GiB": number("hbm_traffic_bytes", 2**30),
    "estimate, ms": number("estimated_seconds", 1e-3),
}
SHARDED: Columns = {
    **NEEDS,
    "HBM traffic, GB": number("hbm_traffic_bytes", 1e9),
    "collectives, GB": number("collective_bytes", 1e9, ",.2f"),
    "estimate, ms": number("estimated_seconds", 1e-3, ",.1f"),
}
ADAPTERS: Columns = {
    "row": name,
    "longest context": number("longest"),
    "8,192 tokens need, MiB": needed,
    "estimate, ms": number("estimated_seconds", 1e-3),
}
METHODS: Columns = {
    "network": text("network"),
    "row": name,
    "activations, stock, MiB": mib("stock_activation_bytes"),
    "of `jaxcomp.models`, MiB": mib("own_activation_bytes"),
    "estimate, stock, ms": number("stock_estimated_seconds", 1e-3, ".1f"),
    "of `jaxcomp.models`, ms": number("own_estimated_seconds", 1e-3, ".1f"),
}
BLOCKS: Columns = {
    "block": text("block"),
    "strategy": name,
    "declared, MiB": number("declared_bytes", 2**20, ".1f"),
    "compiled, MiB": number("compiled_bytes", 2**20, ".1f"),
    "HBM traffic, MiB": mib("hbm_traffic_bytes"),
}
COMPILE: Columns = {
    "row": name,
    "tracing": number("trace", 1, ".1f"),
    "lowering": number("lower", 1, ".1f"),
    "XLA": number("xla", 1, ".1f"),
    "sum": number("sum", 1, ".1f"),
    "/ plain": ratio("sum"),
    "kernels": number("kernels"),
}
ACCURACY: Columns = {
    "row": name,
    "seeds": text("seeds"),
    "test accuracy": number("test_accuracy", 1, ".2f"),
    "difference, points": text("test_accuracy_difference"),
    "test loss": number("test_loss", 1, ".4f"),
    "difference": text("test_loss_difference"),
}
NOISE: Columns = {
    "row": name,
    "bits": number("bits", 1, ".2f"),
    "steps": text("steps"),
    "noise / SGD's": number("noise_over_sgd", 1, ".3f"),
    "bias": bias,
}
ATTENTION: Columns = {
    "network": text("network"),
    "attention": text("attention"),
    "row": name,
    "needs, MiB": mib("total_bytes"),
    "HBM traffic, MiB": mib("hbm_traffic_bytes"),
    "kernels": number("kernels"),
}
LIMIT: Columns = {
    "network": text("model"),
    "values": text("kind"),
    "code": text("row"),
    "bits": number("bits", 1, ".2f"),
    "error / variance": number("error", 1, ".2g"),
    "/ limit": number("distance", 1, ".1f"),
}
OUTLIERS: Columns = {
    "values": text("kind"),
    "code": text("row"),
    "bits": number("bits", 1, ".2f"),
    "median channel": number("median", 1, ".2g"),
    "mean of the channels": number("mean", 1, ".2g"),
    "total": number("total", 1, ".2g"),
}
BUDGETS: Columns = {
    "budget / plain": number("fraction", 1, ".2f"),
    "chosen": text("chosen_plan"),
    "needs, MiB": needed,
    "estimate, ms": number("milliseconds", 1, ".1f"),
}


FITTED: Columns = {
    "step": lambda row: f"{row.values['network']}, {row.values['target']}",
    "budget / plain": number("fraction", 1, ".2f"),
    "chosen": text("chosen_plan"),
    "estimate, ms": number("milliseconds", 1, ".1f"),
    "/ by hand": number("over", 1, ".3f"),
    "fastest by hand": text("hand"),
}
AUDIT: Columns = {
    "step": lambda row: row.name,
    "device": text("target"),
    "budgets": text("budgets"),
    "plans": text("plans"),
    "fit": text("fit"),
    "higher peak at a smaller budget": text("rises"),
    "all choices": text("choices"),
    "fastest found / fastest of all choices": number("slowest", 1, ".3f"),
}
GATES: Columns = {
    "operation": text("operation"),
    "codec": name_of_codec,
    "declared, MiB": number("declared_bytes", 2**20, ".2f"),
    "compiled, MiB": number("alive_bytes", 2**20, ".2f"),
    "/ declared": number("over", 1, ".2f"),
}
TRAINED: Columns = {
    "row": name,
    "test accuracy, %": text("accuracy"),
    "difference, points": text("accuracy_difference"),
    "declared, MiB": number("declared_residual_bytes", 2**20, ".1f"),
    "temp, MiB": number("temp_bytes", 2**20, ".1f"),
    "step / plain": number("step_time_ratio", 1, ".2f"),
}
FEATURES: Columns = {
    "row": name,
    "stem": text("stem"),
    "middle": text("middle"),
    "last block": text("last"),
    "Grad-CAM overlap": text("overlap"),
}
KERNELS: Columns = {
    "network": text("model"),
    "row": name,
    "kernels": text("kernel"),
    "ms": number("milliseconds", 1, ".1f"),
    "bytes, ms": number("milliseconds_of_bytes", 1, ".1f"),
    "ratio": number("over", 1, ".2f"),
}
MODELLED: Columns = {
    "codes": text("step"),
    "row": name,
    "kernels": number("runs"),
    "modelled, ms": number("seconds", 1e-3, ".2f"),
    "/ plain": ratio("seconds"),
}
HEAD: Columns = {
    "loss": lambda row: row.name,
    "temp, MiB": mib("temp_bytes"),
    "HBM traffic, GiB": number("hbm_traffic_bytes", 2**30, ".2f"),
    "estimate, ms": number("estimated_seconds", 1e-3, ".1f"),
}
PRODUCTS: Columns = {
    "matrix": text("matrix"),
    "block": lambda row: row.name,
    "density": number("density", 1, ".2f"),
}
LOSSES: Columns = {
    "row": name,
    "loss": text("validation_loss"),
    "difference": text("validation_loss_difference"),
}
DECLARED: Columns = {
    "declared, MiB": number("declared_bytes", 2**20, ".1f"),
    "temp, MiB": number("temp_bytes", 2**20, ".1f"),
}
TEXTS: Columns = {
    **LOSSES,
    "accuracy, %": text("validation_accuracy"),
    "difference, points": text("validation_accuracy_difference"),
    **DECLARED,
}
DENOISING: Columns = {**LOSSES, **DECLARED}
WHEN: Mapping[str, str] = {
    "plain": "it fits",
    "remat": "exact; there are FLOPs to spare",
    "remat:dots": "exact; a little memory is missing",
    "accumulate:4": "exact; no batch norms, the parts keep the device busy",
    "accumulate:2": "exact; no batch norms, the parts keep the device busy",
    "offload": "exact; the link to the host is fast",
    "exact": "exact; attentions hold the peak",
    "fused:bits=4": "batch norms",
    "fused:bits=3": "batch norms, less memory than 4 bits",
    "fused:bits=2": "batch norms, if nothing else fits and the bias is accepted",
    "quantize:bits=4": "to code everything alike",
    "quantize:bits=2": "to code everything alike, in less memory",
    "transformer:bits=4": "transformers; the default `automatic` does this without batch norms",
    "transformer:bits=2": "transformers, if the noise is small beside SGD's",
    "pooling:window=2": "to study the method",
    "pooling:window=2,rest_bits=4": "to study the method",
    "actnn:level=L4": "host memory instead of device memory",
    "offload:fused:bits=3": "batch norms, host memory instead of device memory",
    "offload:fused:bits=2": "the largest batch, if the bias is accepted",
    "boundary:quantize:bits=8": "one code for each block, if the bias is accepted",
    "boundary:quantize:bits=4": "one code for each block, if the bias is accepted",
    "accumulate:2:transformer:bits=4": "least memory without bias",
    "pruning:density=0.25": "to study the method",
    "pruning:density=0.25,rest_bits=2": "to study the method",
}


FAULTS: Mapping[str, str] = {
    "bad inputs": "bad inputs of public functions: the error names the argument",
    "damaged files": "damaged checkpoints, cached compilations, policies and plans",
    "failing rows": "rows of `jc.compare` that fail, of whatever error: the other rows stay",
    "commands ended by a signal": (
        "`jaxcomp memory` ended by SIGKILL, SIGTERM or Ctrl-C: its compiler ends, too"
    ),
    "kills of a training run": (
        "a training run killed by SIGKILL: the resumed history is bit-equal"
    ),
}


def cheat_sheet(record: str, rows: tuple[str, ...], gradients: Mapping[str, int]) -> Table:
    """Bytes, time and bias of strategies, and when to use each."""
    columns = {
        "row": name,
        "needs, MiB": needed,
        "estimated time / plain": ratio("estimated_seconds"),
        "bias of the gradient": bias_or_kind(gradients),
        "when": lambda row: WHEN[row.name],
    }
    others = tuple(Source(other, reader=noise) for other in gradients)
    return Table(columns, (Source(record, rows),), others)


RAN: Columns = {
    "row": name,
    "needs, MiB": needed,
    "in use, MiB": mib("in_use_bytes"),
    "step, ms": number("step_seconds", 1e-3, ".1f"),
    "step / plain": TIME,
}
FLAGS = "all_fusions_with_triton", "enable_fusion_autotuner", "enable_conv_fusion"
FLAGGED = "plain", "fused:bits=4", "fused:bits=4,kernels=true"


def measured(estimates: str, *sources: Source) -> Table:
    """Steps that ran, beside the estimates of another record."""
    columns = {
        **RAN,
        "estimated": of(estimates, ratio("estimated_seconds")),
        "HBM traffic / plain": of(estimates, ratio("hbm_traffic_bytes")),
    }
    return Table(columns, sources, (Source(estimates),))


def earlier(model: str, *rows: str) -> Source:
    """Rows that ran on an H200 with earlier code alone."""
    return Source(f"device/{model}-h200-before/device.json", rows)


def time_over_plain(row: Row) -> str:
    """The measured time over plain's, or the estimated one where none was measured."""
    return TIME(row) or f"{ratio('estimated_seconds')(row)} (estimated)"


def instructions(
    before: Mapping[str, str], now: Mapping[str, str], pallas: Mapping[str, str]
) -> Table:
    """Instructions of kernels, by the names of XLA's before and now, and of those of Pallas."""
    counted = number("instructions", 1, ".1f")
    others = (
        Source(INSTRUCTIONS("bottlenecks-h200"), reader=instructions_of(now)),
        Source(INSTRUCTIONS("bottlenecks-h200-kernels"), reader=instructions_of(pallas)),
    )
    columns = {"kernel": text("row"), "XLA, before": counted}
    for column, other in zip(("XLA, now", "kernels of rows"), others, strict=True):
        columns[column] = of(other.record, counted, other.reader)
    source = Source(INSTRUCTIONS("bottlenecks-h200-before"), reader=instructions_of(before))
    return Table(columns, (source,), others)


INSTRUCTIONS = "instructions/{}/instructions.json".format
H200 = "device/{}-h200/device.json".format
MEMORY = "{}/memory.json".format
ZOO, CODES = "zoo/zoo.json", "scenarios/zoo.json"
SHARDING, SHARDING_BEFORE = "sharding/sharding.json", "sharding-before/sharding.json"

RESNET50_MAIN = (
    *("plain", "remat", "accumulate:4", "quantize:bits=4", "quantize:bits=2"),
    *("fused:bits=4", "fused:bits=3", "fused:bits=2"),
)
RESNET50_H200 = (
    Source(H200("resnet50")),
    Source("device/resnet50-h200-uint2/device.json", ("automatic:bits=3", "fused:bits=2")),
    Source("device/resnet50-h200-exact/device.json", ("quantize:bits=2",)),
    Source("device/resnet50-h200-before/device.json", ("accumulate:4",)),
)
POOLING = (
    *("plain", "remat", "accumulate:4", "pooling:window=2"),
    "pooling:window=4 @ blocks/[0-2]/.* + pooling:window=2",
    "pooling:window=4 @ blocks/[0-6]/.* + pooling:window=2",
    *("pooling:window=2,rest_bits=4", "pooling:window=2,rest_bits=2"),
)
FUSED = (
    *("plain", "remat", "accumulate:4", "fused:bits=4", "fused:bits=4,scale_source=range"),
    *("fused:bits=3", "fused:bits=3,kernels=true", "fused:bits=3,scale_source=range"),
    "fused:bits=2",
    *("fused:bits=2,scale_source=range", "offload:fused:bits=2"),
)
SHORT = (
    *("plain", "remat", "accumulate:4", "exact", "transformer:bits=4", "transformer:bits=2"),
    "accumulate:2:transformer:bits=4",
)
LM = "plain", "remat", "accumulate:4", "quantize:bits=4", "transformer:bits=4"


def zoo(target: str) -> Table:
    """Stock networks on a device."""
    return Table(NETWORK, (Source(ZOO, where={"target": target}),))


def sharded(case: str, target: str, record: str = SHARDING) -> Table:
    """Steps of one case for several devices."""
    return Table(SHARDED, (Source(record, where={"case": case, "target": target}),))


def traffic(*products: str) -> Columns:
    """MiB of traffic of each way to multiply by block-sparse codes."""
    return {f"`{product}`, MiB": mib(f"{product} traffic") for product in products}


def resnet20(*rows: str) -> Source:
    """Noise and bias of ResNet-20."""
    return Source("gradients/gradients.json", rows, reader=noise)


def resnet20_fused(*rows: str) -> Source:
    """Noise and bias of ResNet-20 with codes that have dither."""
    return Source("gradients-fused/gradients.json", rows, reader=noise)


def folded(record: str, columns: Columns, shown: tuple[str, ...], title: str) -> dict[str, Table]:
    """Two tables of one record: the rows to read first, and the others."""
    return {
        title: Table(columns, (Source(record, shown),)),
        f"{title}-others": Table(columns, (Source(record, without=shown),)),
    }


TABLES: dict[str, Table] = {
    "overview": Table(
        {
            "step": text("step"),
            "row": name,
            "needs, MiB": needed,
            "time / plain": time_over_plain,
        },
        (
            Source(
                H200("scanned_lm"),
                ("plain", "remat", "accumulate:2", "transformer:bits=4"),
                step="language model, H200",
            ),
            Source(H200("resnet50"), ("plain", "remat"), step="own ResNet-50, H200"),
            Source(
                "device/resnet50-h200-before/device.json",
                ("accumulate:4",),
                step="own ResNet-50, H200",
            ),
            Source(H200("resnet50"), ("fused:bits=4",), step="own ResNet-50, H200"),
            Source(
                ZOO,
                ("plain", "remat", "accumulate:4", "automatic"),
                where={"network": "resnet50_nnx", "target": "h100"},
                step="stock ResNet-50, H100",
            ),
        ),
    ),
    "resnet50-h200": measured(MEMORY("resnet50-h200"), *RESNET50_H200),
    "scanned_lm-h200": measured(MEMORY("transformers-h200/scanned_lm"), Source(H200("scanned_lm"))),
    "lm-h200": measured(
        MEMORY("transformers-h200/lm"), Source(H200("lm")), earlier("lm", "accumulate:2")
    ),
    "vit_b16-h200": measured(
        MEMORY("transformers-h200/vit_b16"),
        Source(H200("vit_b16")),
        earlier("vit_b16", "accumulate:4", "quantize:bits=4"),
    ),
    "efficientnet_b0-h200": Table(RAN, (Source(H200("efficientnet_b0")),)),
    "flags-h200": Table(
        {"flag": text("step"), "row": name, "step, ms": RAN["step, ms"]},
        (
            Source(H200("resnet50"), FLAGGED, step="none"),
            *(
                Source(f"device/flags-resnet50-h200/{flag}/device.json", FLAGGED, step=flag)
                for flag in FLAGS
            ),
        ),
    ),
    **folded(MEMORY("resnet50-h100"), STEP, RESNET50_MAIN, "resnet50-h100"),
    "resnet50-a100": Table(STEP, (Source(MEMORY("resnet50-a100")),)),
    "resnet50-v5e": Table(CYCLES, (Source(MEMORY("resnet50-v5e")),)),
    "pooling": Table(FLOPS, (Source(MEMORY("resnet50-h100"), POOLING),)),
    "fused": Table(PEAK, (Source(MEMORY("resnet50-h100"), FUSED),)),
    "actnn": Table(
        STEP,
        (
            Source(
                MEMORY("resnet50-h100"),
                (
                    *("plain", "remat", "accumulate:4", "quantize:bits=4", "quantize:bits=2"),
                    "actnn:level=L4",
                ),
            ),
        ),
    ),
    "resmlp_s24-h100": Table(
        {"row": name, "needs, MiB": needed, "temp, MiB": mib("temp_bytes"), **TRAFFIC},
        (Source(MEMORY("resmlp_s24-h100")),),
    ),
    "pruning": Table(STEP, (Source(MEMORY("resmlp_s24-h100")),)),
    "stage-h100": Table(STEP, (Source(MEMORY("stage-h100")),)),
    "stage-v5e": Table(STEP, (Source(MEMORY("stage-v5e")),)),
    "zoo-h100": zoo("h100"),
    "zoo-rtx4090": zoo("rtx4090"),
    "zoo-rtx3060": zoo("rtx3060-12gb"),
    "zoo-v5e": zoo("v5e"),
    "zoo-t4": zoo("t4"),
    "zoo-l4": zoo("l4"),
    "training-codes": Table(CODE, (Source(CODES),)),
    "training-codes-long": Table(CODE, (Source("scenarios-long/zoo.json"),)),
    "pair-stack": Table(
        {"residues": number("batch"), **NEEDS, "estimate, ms": number("estimated_seconds", 1e-3)},
        (
            Source(
                CODES,
                ("remat", "remat+exact", "remat+boundary:quantize:bits=4"),
                where={"network": "pair_stack"},
            ),
            Source("scenarios-long/zoo.json"),
        ),
    ),
    "methods": Table(METHODS, (Source("methods-h100/methods.json", reader=networks),)),
    **folded(MEMORY("transformers-h100/lm"), TEMP, LM, "lm-h100"),
    "long_lm-h100": Table(TEMP, (Source(MEMORY("transformers-h100/long_lm")),)),
    "scanned_lm-h100": Table(TEMP, (Source(MEMORY("transformers-h100/scanned_lm")),)),
    "vit_b16-h100": Table(TEMP, (Source(MEMORY("transformers-h100/vit_b16")),)),
    "lm-v5e": Table(TEMP, (Source(MEMORY("transformers-v5e/lm")),)),
    "scanned_lm-v5e": Table(TEMP, (Source(MEMORY("transformers-v5e/scanned_lm")),)),
    "vit_b16-v5e": Table(TEMP, (Source(MEMORY("transformers-v5e/vit_b16")),)),
    "blocks": Table(BLOCKS, (Source("checkpoint-h100/checkpoint.json"),)),
    "decoder-h100": sharded("decoder, fsdp", "h100:8"),
    "decoder-v5e": sharded("decoder, fsdp", "v5e:4x4"),
    "decoder-v5p": sharded("decoder, fsdp", "v5p:8x8x4", SHARDING_BEFORE),
    "resnet50-fsdp-h100": sharded("resnet50, fsdp", "h100:8"),
    "resnet50-data-h100": sharded("resnet50, data", "h100:8"),
    "resnet50-fsdp-v5e": sharded("resnet50, fsdp", "v5e:4x4", SHARDING_BEFORE),
    "resnet50-data-v5e": sharded("resnet50, data", "v5e:4x4", SHARDING_BEFORE),
    "resnet50-fsdp-v5p": sharded("resnet50, fsdp", "v5p:8x8x4", SHARDING_BEFORE),
    "resnet50-data-v5p": sharded("resnet50, data", "v5p:8x8x4", SHARDING_BEFORE),
    "decoder-h100-16": sharded("decoder, fsdp", "h100:16"),
    "decoder-h100-64": sharded("decoder, fsdp", "h100:64"),
    "adapters-rtx4090": Table(
        ADAPTERS, (Source("lora/lora.json", where={"target": "rtx4090"}, reader=adapters),)
    ),
    "adapters-v5e": Table(
        ADAPTERS, (Source("lora/lora.json", where={"target": "v5e"}, reader=adapters),)
    ),
    **{
        case: Table(COMPILE, (Source(f"{case}/compile_time.json", reader=compile_times),))
        for case in ("compile_time", "compile_time-lm")
    },
    "accuracy": Table(
        ACCURACY,
        (
            Source("accuracy-levels/runs.json", reader=seeds),
            Source(
                "accuracy/runs.json",
                ("remat", "fused:bits=2", "quantize:bits=2", "division", "pooling:window=2"),
                reader=seeds,
            ),
        ),
    ),
    "accuracy-resnet14": Table(ACCURACY, (Source("accuracy-resnet14/runs.json", reader=seeds),)),
    "accuracy-resmlp": Table(ACCURACY, (Source("accuracy-resmlp/runs.json", reader=seeds),)),
    "accuracy-pruning": Table(ACCURACY, (Source("accuracy-pruning/runs.json", reader=seeds),)),
    "lm-short": Table(TEMP, (Source(MEMORY("transformers-h100/lm"), SHORT),)),
    "long_lm-short": Table(
        TEMP,
        (
            Source(
                MEMORY("transformers-h100/long_lm"),
                ("plain", "remat", "transformer:bits=4", "transformer:bits=2"),
            ),
        ),
    ),
    "noise-division-resmlp": Table(
        NOISE,
        (
            Source(
                "gradients-resmlp/gradients.json",
                tuple(f"{m}:bits={b}" for m in ("division", "quantize") for b in (1, 2, 4, 8)),
                where={"steps": 60},
                reader=noise,
            ),
        ),
    ),
    "trained-division": Table(
        TRAINED,
        (Source("quantization/comparison.json", ("plain", "remat", "division"), reader=trained),),
    ),
    "trained-actnn": Table(
        TRAINED,
        (Source("quantization/comparison.json", ("plain", "remat", "actnn"), reader=trained),),
    ),
    "transformer-lm": Table(TEXTS, (Source("transformers/lm/runs.json", reader=texts),)),
    "transformer-lm-cpu": Table(TEXTS, (Source("transformers-cpu/lm/runs.json", reader=texts),)),
    "transformer-lora": Table(TEXTS, (Source("transformers-cpu/lora/runs.json", reader=texts),)),
    "diffusion": Table(DENOISING, (Source("transformers-cpu/diffusion/runs.json", reader=texts),)),
    "transformer-vit": Table(TEXTS, (Source("transformers/vit/runs.json", reader=texts),)),
    "noise-lm": Table(NOISE, (Source("gradients-lm/gradients.json", reader=noise),)),
    "noise-lm-dither": Table(NOISE, (Source("gradients-lm-dither/gradients.json", reader=noise),)),
    "noise-lm-allocated": Table(
        NOISE, (Source("gradients-lm-allocated/gradients.json", reader=noise),)
    ),
    "noise-vit-allocated": Table(
        NOISE, (Source("gradients-vit-allocated/gradients.json", reader=noise),)
    ),
    "noise-resnet20-allocated": Table(
        NOISE, (Source("gradients-resnet20-allocated/gradients.json", reader=noise),)
    ),
    "noise-pooling-sampled": Table(
        NOISE, (Source("gradients-sampled/gradients.json", reader=noise),)
    ),
    "noise-pruning-sampled": Table(
        NOISE, (Source("gradients-sampled-resmlp/gradients.json", reader=noise),)
    ),
    "attention": Table(ATTENTION, (Source("attention-h100/attention.json"),)),
    "limit": Table(LIMIT, (Source("limit/limit.json", reader=distances),)),
    "subspaces": Table(LIMIT, (Source("limit/limit.json", reader=subspaces),)),
    "outliers": Table(OUTLIERS, (Source("outliers/outliers.json"),)),
    "noise-vit": Table(NOISE, (Source("gradients-vit/gradients.json", reader=noise),)),
    "noise-actnn": Table(
        NOISE,
        (
            resnet20(*(f"quantize:bits={bits}" for bits in (8, 4, 3, 2, 1))),
            resnet20(*(f"planned:quantize:bits={bits}" for bits in (4, 3, 2))),
        ),
    ),
    "noise-division": Table(
        NOISE, (resnet20(*(f"division:bits={bits}" for bits in (8, 4, 2, 1)), "quantize:bits=2"),)
    ),
    "noise-pooling": Table(
        NOISE,
        (
            resnet20("pooling:window=2", "pooling:window=4", "quantize:bits=2", "division:bits=2"),
            resnet20_fused("fused:bits=4"),
            resnet20("fused:bits=2"),
        ),
    ),
    "noise-fused": Table(
        NOISE,
        (
            resnet20_fused("fused:bits=4", "fused:bits=3"),
            resnet20("fused:bits=2"),
            resnet20(*(f"fused:bits={bits},scale_source=range" for bits in (4, 3, 2))),
        ),
    ),
    "noise-resmlp": Table(NOISE, (Source("gradients-resmlp/gradients.json", reader=noise),)),
    **{
        f"trained-{title}": Table(TRAINED, (Source(record, reader=trained),))
        for title, record in {
            "quantization": "quantization/comparison.json",
            "pruning": "pruning/comparison.json",
            "resnet20-3": "pooling/resnet20-3/comparison.json",
            "resnet20-6": "pooling/resnet20-6/comparison.json",
            "resnet18-2": "pooling/resnet18-2/comparison.json",
            "resnet18-3": "pooling/resnet18-3/comparison.json",
        }.items()
    },
    **{
        f"features-{case}": Table(
            FEATURES, (Source(f"pooling/{case}/features.json", reader=features),)
        )
        for case in ("resnet20-3", "resnet20-6", "resnet18-3")
    },
    "demo": Table(
        {"row": name} | {key: TRAINED[key] for key in ("declared, MiB", "temp, MiB")},
        (Source("demo/comparison.json", reader=trained),),
    ),
    "kernels-h200": Table(
        KERNELS,
        tuple(
            Source(f"device/kernels-{network}-h200/kernels.json", rows, reader=kinds_of_kernels)
            for network, rows in (
                ("resnet50", ("plain", "fused:bits=4")),
                ("lm", ()),
                ("vit_b16", ()),
            )
        ),
    ),
    "kernels-h200-3bits": Table(
        KERNELS,
        (Source("device/kernels-resnet50-h200-3bits/kernels.json", reader=kinds_of_kernels),),
    ),
    "instructions": instructions(
        before={
            "loop_convert_maximum_fusion_4": "norm and ReLU, one code",
            "loop_convert_maximum_fusion": "norm, sum and ReLU, two codes",
            "loop_convert_fusion_15": "decoding for the gradient of a 3x3 kernel, with dither",
            "input_reduce_fusion_3": "sums of a norm's backward pass",
            "loop_convert_fusion_8": "the rest of it, code of a pre-activation",
            "loop_convert_fusion_7": "the rest of it, code of normalised values",
        },
        now={
            "loop_convert_maximum_fusion_4": "norm and ReLU, one code",
            "loop_convert_maximum_fusion": "norm, sum and ReLU, two codes",
            "loop_convert_fusion_9": "decoding for the gradient of a 3x3 kernel, with dither",
            "input_reduce_fusion_3": "sums of a norm's backward pass",
            "loop_convert_fusion_2": "the rest of it, code of a pre-activation",
            "loop_convert_fusion": "the rest of it, code of normalised values",
        },
        pallas={
            "rows": "norm and ReLU, one code",
            "rows__1": "norm, sum and ReLU, two codes",
            "rows__4": "decoding for the gradient of a 3x3 kernel, with dither",
            "rows__5": "sums of a norm's backward pass",
            "rows__6": "the rest of it, code of a pre-activation",
            "rows__3": "the rest of it, code of normalised values",
        },
    ),
    "modelled": Table(
        MODELLED,
        (
            Source(INSTRUCTIONS("bottlenecks-h200-before"), step="before"),
            Source(INSTRUCTIONS("bottlenecks-h200"), ("fused:bits=4",), step="now"),
            Source(
                INSTRUCTIONS("bottlenecks-h200-kernels"),
                ("fused:bits=4,kernels=true",),
                step="kernels of rows",
            ),
        ),
    ),
    "modelled-resnet50": Table(
        MODELLED, (Source(INSTRUCTIONS("resnet50-h200"), step="ResNet-50, H200"),)
    ),
    "faults": Table(
        {"fault": lambda row: FAULTS[row.name], "tried": number("tried")},
        (Source("faults/faults.json", reader=faults),),
    ),
    "fit-audit": Table(
        AUDIT,
        tuple(
            Source(f"{of}/fit_audit.json", reader=audits) for of in ("fit-audit", "fit-audit-gpu")
        ),
    ),
    "fit": Table(FITTED, (Source("fit/fit.json", reader=fitted),)),
    **{
        f"budgets-{case}": Table(BUDGETS, (Source(f"budgets-{case}/budgets.json", reader=budgets),))
        for case in ("vit_b16-rtx3060", "resnet50_nnx-h100", "lm-h100")
    },
    **{
        title: Table(HEAD, (Source(f"{title}/head.json", reader=heads),))
        for title in ("head-h100", "head-v5e", "head-v5e-log-probs")
    },
    "block_sparse-h100": Table(
        {**PRODUCTS, **traffic("dense", "rows")},
        (Source("block_sparse/block_sparse.json", where={"matrix": "fc2"}, reader=products),),
    ),
    "block_sparse-v5e": Table(
        {**PRODUCTS, **traffic("dense", "rows", "tpu")},
        (Source("block_sparse-v5e/block_sparse.json", reader=products),),
    ),
    "block_sparse-h200": Table(
        {**PRODUCTS}
        | {
            f"`{product}` / `dense`": number(f"{product} time", 1, ".2f")
            for product in ("rows", "triton")
        },
        (Source("block_sparse-h200/block_sparse.json", reader=products),),
    ),
    "largest-batch": Table(
        {
            "row": name,
            "RTX 4060, 8 GB": number("rtx4060-8gb"),
            "RTX 3060, 12 GB": number("rtx3060-12gb"),
            "RTX 4060 Ti, 16 GB": number("rtx4060ti-16gb"),
            "RTX 3090, 24 GB": number("rtx3090"),
        },
        (Source("fits-resnet50/fits.json", reader=largest_batches),),
    ),
    "largest-batch-h100": Table(
        {"network": text("model"), "row": name, "largest batch": number("h100")},
        (
            Source("fits-resnet50-h100/fits.json", reader=largest_batches),
            Source("fits-resnet152-h100/fits.json", reader=largest_batches),
        ),
    ),
    "gates-h100": Table(GATES, (Source("gates-h100/gates.json", reader=operations),)),
    "gates-v5e": Table(GATES, (Source("gates-v5e/gates.json", reader=operations),)),
    "loops": Table(NETWORK, (Source("loops/zoo.json"),)),
    "regions": Table(NETWORK, (Source("regions/zoo.json"),)),
    "cheat-resnet50": cheat_sheet(
        MEMORY("resnet50-h100"),
        (
            *("plain", "remat", "remat:dots", "accumulate:4", "offload", "fused:bits=4"),
            *("fused:bits=3", "fused:bits=2", "quantize:bits=4", "quantize:bits=2"),
            *("actnn:level=L4", "offload:fused:bits=3", "offload:fused:bits=2"),
            *("pooling:window=2", "pooling:window=2,rest_bits=4"),
        ),
        {"gradients/gradients.json": 60, "gradients-fused/gradients.json": 60},
    ),
    "cheat-lm": cheat_sheet(
        MEMORY("transformers-h100/scanned_lm"),
        (
            *("plain", "remat", "remat:dots", "accumulate:2", "offload", "exact"),
            *("transformer:bits=4", "transformer:bits=2", "quantize:bits=4"),
            "accumulate:2:transformer:bits=4",
        ),
        {"gradients-lm/gradients.json": 100},
    ),
    "cheat-resmlp": cheat_sheet(
        MEMORY("resmlp_s24-h100"),
        (
            *("plain", "remat", "accumulate:4", "boundary:quantize:bits=8"),
            *("pruning:density=0.25", "pruning:density=0.25,rest_bits=2"),
        ),
        {"gradients-resmlp/gradients.json": 60},
    ),
}
