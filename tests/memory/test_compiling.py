import contextlib
import functools
import os
import re
import select
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxcomp.memory import CompileError, analyze, compiler_options, timeline
from jaxcomp.memory import _compile_worker as compile_worker
from jaxcomp.memory import _compiling as compiling
from jaxcomp.memory._compiling import compile_step
from jaxcomp.memory._live_bytes import compile_with_timeline
from jaxcomp.memory._targets import Target, resolve
from jaxcomp.memory._tracing import trace
from jaxcomp.memory._traffic import hbm_traffic

X = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def installed(*wheels):
    names = {distribution.metadata["Name"] for distribution in metadata.distributions()}
    return not names.isdisjoint(wheels)


needs_gpu_compiler = pytest.mark.skipif(
    not installed("jax-cuda13-pjrt", "jax-cuda12-pjrt"), reason="needs jaxcomp[gpu-aot]"
)


def step(weights, x):
    def loss(weights):
        with jax.named_scope("encoder"):
            return jnp.sin(x @ weights["kernel"]).sum()

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


def test_a_jitted_function_has_its_own_options():
    with pytest.raises(ValueError, match=r"donate_argnums=\(0,\).* jitted already"):
        trace(jax.jit(step), {"kernel": X}, X, donate_argnums=(0,))


def test_donated_leaves_are_known():
    assert trace(step, {"kernel": X}, X, donate_argnums=0).donated == (0,)
    assert trace(jax.jit(step, donate_argnums=1), {"kernel": X}, X).donated == (1,)


def test_an_argument_on_another_platform_is_an_error():
    array = jax.device_put(jnp.ones((4,)), jax.devices("cpu")[0])
    gpu = Target("gpu", "gpu", attached=True, devices=1)
    with pytest.raises(ValueError, match=r"target='gpu': an argument lies on cpu devices"):
        compile_step(trace(jnp.sin, array), gpu)


def test_a_mesh_of_absent_devices_is_not_for_attached_ones():
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = X.update(sharding=NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(ValueError, match=r"target='cpu': an argument lies on an abstract mesh's"):
        compile_step(trace(jnp.sin, x), resolve("cpu"))


@needs_gpu_compiler
def test_a_jits_compiler_options_are_the_targets_but_for_what_this_device_needs(monkeypatch):
    sine = trace(jax.jit(jnp.sin, compiler_options={"xla_no_option": "1"}), X)
    with pytest.raises(CompileError, match="xla_no_option"):
        compile_step(sine, resolve("h100"))
    monkeypatch.setattr(compiling, "compiler_options", lambda: {"xla_no_option": "1"})
    compile_step(sine, resolve("h100"))


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The programs that a compiler was asked for, beside an empty cache in the user's folder."""
    asked, ask = [], compiling._ask_child

    def counting(request, target):
        asked.append(request)
        return ask(request, target)

    monkeypatch.setattr(compiling, "_ask_child", counting)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield asked
    jax.config.update("jax_compilation_cache_dir", before)


# The same program, and others. A name of a scope decides about groups of modules.
SAME = """
def f(x):
    with jax.named_scope("net"):
        return jnp.sin(x @ x) * 2
"""
MOVED = "\n\n\n" + SAME.replace("    with", "    # moved\n    with") + "\n"
OTHERS = {
    "a number": SAME.replace("* 2", "* 3"),
    "a name": SAME.replace("net", "other"),
    "an operation": SAME.replace("sin", "cos"),
    "an order": SAME.replace("jnp.sin(x @ x)", "(jnp.sin(x) @ x)"),
}


def compiled(source, **options):
    space = {"jax": jax, "jnp": jnp}
    exec(source, space)
    with compiling.apart():
        return compile_step(trace(space["f"], jnp.ones((4, 4))), resolve("cpu"), **options)


def test_a_second_look_is_not_compiled_wherever_its_lines_are(asked, tmp_path):
    first = compiled(SAME)
    assert [path.parent.name for path in tmp_path.rglob("jaxcomp-*")] == ["jaxcomp"]
    assert compiled(SAME) == compiled(MOVED) == first
    assert len(asked) == 1
    for number, other in enumerate(OTHERS.values()):
        found = compiled(other)
        assert found != first and len(asked) == 2 + number
    compiled(SAME, xla_remat=False)
    assert len(asked) == 2 + len(OTHERS)
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        compiled(SAME)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert len(asked) == 3 + len(OTHERS)


def test_a_timeline_has_the_lines_of_its_step(asked):
    def sources(source):
        space = {"jax": jax, "jnp": jnp}
        exec(compile(source, "my.py", "exec"), space)
        with compiling.apart():
            found = timeline(space["f"], jnp.ones((4, 4)), target="cpu")
        return {buffer.origin.source for buffer in found.buffers}

    first, moved, again = [sources(source) for source in (SAME, MOVED, SAME)]
    assert "my.py:4" in first and "my.py:8" in moved
    assert again == first and len(asked) == 2


def test_a_cpu_apart_gives_the_same_figures_and_timeline():
    gradient = jax.jit(jax.grad(lambda w, x: step(w, x)["kernel"].sum()))
    here, there = [], []
    for found, where in ((here, contextlib.nullcontext()), (there, compiling.apart())):
        with where:
            traced = trace(gradient, {"kernel": X}, X)
            compiled, live = compile_with_timeline(
                traced, resolve("cpu"), xla_remat=True, with_lines=True
            )
            found += [compiled.memory, live.live_bytes, live.phases, live.table()]
    assert here == there


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is of Linux")
def test_a_compiler_ends_with_the_process_that_waits_for_it(tmp_path):
    read, write = os.pipe()
    code = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, '-P', *sys.argv[1:], str(os.getpid())]\n"
        "child = subprocess.Popen(command, stdin=int(sys.stdin.read()))\n"
        "print(child.pid, flush=True)\n"
        "child.wait()"
    )
    command = [sys.executable, "-c", code, compile_worker.__file__, str(tmp_path / "answer")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[read]) as parent:
        parent.stdin.write(str(read).encode())
        parent.stdin.close()
        child = int(parent.stdout.readline())
        os.close(read)
        os.write(write, b"(" * 2**17)  # more than a pipe holds: it returns once the worker reads
        assert Path(f"/proc/{child}").exists()
        parent.kill()
        ended, _, _ = select.select([parent.stdout], [], [], 30)  # the worker has closed it, too
    assert ended
    os.close(write)


def test_a_dump_folder_that_cannot_be_written(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(FileExistsError):
        compile_step(trace(jnp.sin, X), resolve("cpu"), dump_dir=occupied)


def test_the_switch_of_xlas_own_remat_is_set_back():
    before = jax.config.values["jax_compiler_enable_remat_pass"]
    compile_step(trace(jnp.sin, X), resolve("cpu"), xla_remat=not before)
    assert jax.config.values["jax_compiler_enable_remat_pass"] == before


@needs_gpu_compiler
def test_an_absent_gpu_keeps_scopes_names_and_dump(tmp_path):
    traced = trace(step, {"kernel": X}, X, donate_argnums=0)
    compiled = compile_step(traced, resolve("h100"), dump_dir=tmp_path)
    assert compiled.hlo_text.startswith("HloModule")
    assert 'op_name="jit(step)/transpose(jvp(encoder))/' in compiled.hlo_text
    assert "op_name=\"weights[\\'kernel\\']\"" in compiled.hlo_text
    assert "call_exported" not in compiled.hlo_text
    assert __file__ in compiled.hlo_text
    assert compiled.memory["alias_size_in_bytes"] == 256 * 256 * 4
    assert list(tmp_path.glob("*-live-range.txt"))


@needs_gpu_compiler
def test_a_compiler_that_aborts_is_an_error_of_that_program(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    with pytest.raises(CompileError, match=r"(?s)compiler for h100 ended.*xla_no_such_flag"):
        compile_step(trace(jnp.sin, X), resolve("h100"))


def transposed_rows(x, w):
    """A product whose rows are a transposed axis of 24: no multiple of XLA's first tiles, of 16."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, 64) @ w


ROWS = (jax.ShapeDtypeStruct((4, 64, 24), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32))


@pytest.mark.aot
@needs_gpu_compiler
@pytest.mark.parametrize("has_bias", [False, True])
def test_an_attention_of_cudnn_is_compiled_without_a_gpu(has_bias, monkeypatch):
    """JAX looks for cuDNN where it traces; the compiler of an absent GPU does not need it."""
    module = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{module}.check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(f"{module}.check_compute_capability", lambda least: True)
    monkeypatch.setattr(f"{module}.is_cuda_compute_capability_equal", lambda one: False)
    q = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((2, 4, 512, 512), jnp.bfloat16) if has_bias else None

    @jax.jit
    def gradient(q, bias):
        def loss(q):
            attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
            return attend(q, q, q, bias=bias, implementation="cudnn").astype(jnp.float32).sum()

        return jax.grad(loss)(q)

    h100 = resolve("h100")
    compiled = compile_step(trace(gradient, q, bias, target=h100), h100)
    calls = re.findall(r'custom_call_target="__cudnn[^"]*Softmax(Backward)?"', compiled.hlo_text)
    assert calls == ["", "Backward"]


@pytest.mark.aot
@needs_gpu_compiler
@pytest.mark.parametrize("target", ["h100", "rtx3060-12gb"])
def test_a_product_that_the_first_tile_sizes_do_not_fit_is_compiled_with_a_flag(target):
    report = analyze(transposed_rows, *ROWS, target=target)
    assert report.total_bytes
    if jax.__version_info__ < (0, 11):  # later versions make the transposition a kernel of its own
        assert report.xla_flag == compiling._TILE_FLAGS[0]
    fitting = jax.ShapeDtypeStruct((4, 64, 32), jnp.float32)
    assert analyze(transposed_rows, fitting, ROWS[1], target=target).xla_flag is None
    step = jax.jit(transposed_rows, compiler_options=compiler_options(triton_gemm=False))
    assert analyze(step, *ROWS, target=target).xla_flag is None


@pytest.mark.aot
@needs_gpu_compiler
def test_the_flag_has_a_timeline_and_changes_no_program_that_compiles_without(monkeypatch):
    sizes = (
        jax.ShapeDtypeStruct((4, 64, 32), jnp.bfloat16),
        jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
    )
    step = trace(jax.grad(lambda x, w: jnp.sin(transposed_rows(x, w)).sum(), (0, 1)), *sizes)
    without = compile_step(step, resolve("h100"))
    monkeypatch.setenv("XLA_FLAGS", compiling._TILE_FLAGS[0])
    flagged = compile_step(step, resolve("h100"))
    assert without.memory == flagged.memory
    assert hbm_traffic(without.hlo_text) == hbm_traffic(flagged.hlo_text)
    monkeypatch.delenv("XLA_FLAGS")
    assert timeline(transposed_rows, *ROWS, target="h100").peak_bytes


@pytest.mark.parametrize("fails", range(4))
def test_flags_are_tried_in_order_for_this_error_alone(fails, monkeypatch):
    asked = []

    def child(request, target, flag=""):
        asked.append(flag)
        if len(asked) <= fails:
            raise CompileError(f"{compiling._NO_TILE_SIZES} {len(asked)}")
        return {"hlo_text": ""}

    monkeypatch.setattr(compiling, "_ask_child", child)
    flags = ["", *compiling._TILE_FLAGS]
    if fails == len(flags):
        with pytest.raises(CompileError, match="tile sizes 1"):
            compiling._with_tile_sizes({}, resolve("cpu"))
    else:
        answer = compiling._with_tile_sizes({}, resolve("cpu"))
        assert answer.get("xla_flag", "") == flags[fails]
    assert asked == flags[: fails + 1]


def test_another_error_is_no_reason_for_a_flag(monkeypatch):
    def child(request, target, flag=""):
        assert not flag
        raise CompileError("another")

    monkeypatch.setattr(compiling, "_ask_child", child)
    with pytest.raises(CompileError, match="another"):
        compiling._with_tile_sizes({}, resolve("cpu"))


def test_text_that_jax_cannot_read_is_that_of_a_dump():
    class Compiled:
        def as_text(self):
            raise jax.errors.JaxRuntimeError("async-update instruction should have 1 operands")

    class Lowered:
        def compile(self, compiler_options):
            for name, text in (("small", "-"), ("whole", "HloModule whole")):
                file = Path(compiler_options["xla_dump_to"], f"{name}.after_codegen.txt")
                file.write_text(text)

    assert compile_worker._text(Compiled(), Lowered(), {}) == "HloModule whole"


def test_without_an_assembler_the_error_says_what_to_install():
    error = f"UNAVAILABLE: {compiling._NO_PTXAS}. Neither ptxas/nvlink nor nvjtlink is available."
    assert "pip install 'jaxcomp[gpu-aot]'" in compiling._explained(error)
    assert compiling._explained("another") == "another"
