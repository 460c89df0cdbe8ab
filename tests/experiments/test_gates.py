import pytest

import jaxcomp as jc
from experiments.bench import gates


def test_a_table_of_another_target_is_not_added_to(tmp_path):
    gates._write(tmp_path, "h100", [])
    with pytest.raises(gates.typer.BadParameter, match="is of target='h100'"):
        gates.main(tmp_path, "v5e", add=True)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("operation", "codec"),
    [
        ("conv", jc.Quantize(2)),
        ("dot", jc.Quantize(4)),
        ("batch_norm", jc.Quantize(2)),
        ("relu", jc.Packed(1)),
        ("max_pool", jc.Packed(2)),
    ],
    ids=str,
)
def test_h100_keeps_what_a_layer_declares(operation, codec, capsys):
    pytest.importorskip("jax_cuda13_plugin")
    gate = gates.GATES[operation]
    figures = gates.measure(gate, codec, "h100")
    dtype = "bool" if isinstance(codec, jc.Packed) else "bfloat16"
    assert figures["declared_bytes"] >= codec.nbytes(gate.shape, dtype)
    with capsys.disabled():
        print(f"\nh100, {operation}, {codec}: {figures}")
    assert figures["alive_bytes"] <= gates.LIMIT * figures["declared_bytes"]
