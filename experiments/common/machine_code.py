"""Machine code of the kernels of a program for an NVIDIA GPU, which need not be there.

XLA dumps each kernel's PTX. `ptxas` makes of it the machine code that the executable holds, if its
version is that of XLA, and `nvdisasm` prints it. Both are in the extra `machine-code`.
"""

import dataclasses
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

WHEELS = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}
_CLASSES = {
    "load, store": r"LDG|STG|LDS|STS|LDSM|LDL|STL|LD|ST|LDGSTS|RED|REDG|ATOMG?|ATOMS|SHFL",
    "float": r"F(ADD|MUL|FMA)(32I)?|FFMA\w*|H(ADD|MUL|FMA|MNMX)2\w*|HSETP?2",
    "integer product": r"IMAD|IMUL",
    "integer sum": r"IADD3?|VIADD|LEA|IABS|I2FP",
    "bits": r"LOP3?|SHF|SHL|SHR|PRMT|BMSK|SGXT|BFE|BFI|R2P|P2R|PLOP3",
    "conversion": r"F2I|I2F|F2F|F2FP|FRND|I2I|I2IP|F2IP",
    "compare, select": r"[IF]SETP|[FI]?SEL|FSET|V?[FI]MNMX3?|VIMNMX\w*|VIADDMNMX|FCHK",
}
CLASSES = (*_CLASSES, "other")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;")
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction of a kernel.

    Attributes:
        name: Its name with all modifiers, such as `LDG.E.128`.
    """

    name: str

    @property
    def kind(self) -> str:
        """One of `CLASSES`."""
        base = self.name.split(".")[0]
        return next((k for k, names in _CLASSES.items() if re.fullmatch(names, base)), "other")

    @property
    def nbytes(self) -> int:
        """Bytes of HBM that a thread reads or writes; 0 for other instructions."""
        if not self.name.startswith(("LDG.", "STG.")):
            return 0
        return next((_WIDTHS[part] for part in self.name.split(".") if part in _WIDTHS), 4)


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """The machine code of a kernel.

    Attributes:
        operations: Its instructions, without those that only fill.
        loops: First and last position of each loop.
        registers: Registers of a thread.
    """

    operations: tuple[Operation, ...]
    loops: tuple[tuple[int, int], ...]
    registers: int

    def weights(self, nbytes: float) -> list[float]:
        """Returns how often each instruction of a thread runs, on average.

        The loop that reads and writes the most bytes moves all of the thread's. All other
        instructions run once.

        Args:
            nbytes: Bytes of HBM that a thread reads and writes.
        """
        counts = [1.0] * len(self.operations)
        moved = {loop: self._moved(*loop) for loop in self.loops}
        if any(moved.values()):
            first, last = most = max(self.loops, key=lambda loop: moved[loop])
            times = max(1.0, nbytes / moved[most])
            counts[first : last + 1] = [times] * (last + 1 - first)
        return counts

    def _moved(self, first: int, last: int) -> int:
        return sum(operation.nbytes for operation in self.operations[first : last + 1])

    def loads(self) -> Counter[int]:
        """Counts the instructions that read HBM, by the bytes that each reads."""
        return Counter(o.nbytes for o in self.operations if o.name.startswith("LDG."))


def tool(name: str) -> Path:
    """Returns the path of a tool.

    Raises:
        ImportError: if its wheel is not installed.
    """
    try:
        found = metadata.distribution(WHEELS[name])
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"{name} is in the wheel {WHEELS[name]}; install it with: "
            "pip install 'jaxcomp[machine-code]'"
        ) from None
    return next(Path(str(found.locate_file(f))) for f in found.files or () if f.name == name)


def disassemble(dump: Path) -> dict[str, MachineCode]:
    """Returns the machine code of each kernel of a program, by the name of the kernel.

    Args:
        dump: Folder to which XLA dumped the program's PTX.

    Raises:
        ImportError: if a tool is not installed.
    """
    assembler, printer = tool("ptxas"), tool("nvdisasm")
    found: dict[str, MachineCode] = {}
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        for path in sorted(dump.glob("*.ptx")):
            target = re.search(r"^\.target (\w+)", path.read_text(), re.MULTILINE)
            if target is None:
                continue  # an empty file, of a kernel that needs no code
            said = _run(assembler, "-v", f"-arch={target[1]}", path, "-o", cubin).stderr
            registers = dict(re.findall(r"function '(\S+)'(?:.|\n)*?Used (\d+) registers", said))
            for name, lines in _functions(_run(printer, "-c", cubin).stdout):
                found[name] = _parse(lines, int(registers[name]))
    return found


def _run(*command: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)


def _functions(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and the lines of each function that `nvdisasm` printed."""
    for section in re.split(r"^//-+ ", text, flags=re.MULTILINE):
        name = re.match(r"\.text\.(\S+)", section)
        if name:
            yield name[1], section.splitlines()


def _parse(lines: list[str], registers: int) -> MachineCode:
    """Reads the instructions of a function, and its loops: jumps to earlier ones."""
    operations: list[Operation] = []
    labels: dict[str, int] = {}
    loops: dict[int, int] = {}
    for line in lines:
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(operations)
        found = _INSTRUCTION.search(line)
        if found is None or found[1] == "NOP":
            continue
        target = re.search(r"\((\.L\w+)\)", found[2])
        if found[1].startswith("BRA") and target and target[1] in labels:
            first = labels[target[1]]
            if first == len(operations):
                continue  # the endless jump behind the last instruction
            loops[first] = len(operations)
        operations.append(Operation(found[1]))
    return MachineCode(tuple(operations), tuple(loops.items()), registers)
