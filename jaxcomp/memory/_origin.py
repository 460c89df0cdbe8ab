"""Traces values of a compiled program back to the model scope, the pass and the source line."""

import dataclasses
import re
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import dropwhile
from typing import Any

from jax.extend.source_info_util import new_name_stack

from jaxcomp.memory._hlo import Computation, Instruction, Module
from jaxcomp.memory._passes import phase

_MOVES = {"copy", "bitcast", "copy-start", "copy-done", "opt-barrier"}
_MACHINERY = re.compile(
    r"(while|body|cond|checkpoint|remat\d?|rematted_computation|closed_call|core_call|eval_jaxpr"
    r"|pjit|scan|shard_map|custom_[jv][vj]p_call(_jaxpr)?|branch_\d+_fun)$"
)
_CODES = {"u2", "u4", "u8", "u16"}
_NEAR = 64
_SCOPE = type(new_name_stack("scope").stack[0])


def scopes_of(name_stack: Any) -> tuple[str, ...]:
    """Returns the names of the scopes of a name stack, outermost first, without transformations.

    Example:
        >>> import jax
        >>> block = jax.named_call(jax.numpy.sin, name="block")
        >>> program = jax.make_jaxpr(jax.vmap(block))(jax.numpy.ones(2))
        >>> scopes_of(program.eqns[0].source_info.name_stack)
        ('block',)
    """
    return tuple(element.name for element in name_stack.stack if isinstance(element, _SCOPE))


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a value of the compiled program.

    Attributes:
        scope: the path of modules or named scopes. In a program without scopes (plain NNX) it is
            the layer of the nearest weight. For an argument it is the argument's name.
        operation: the JAX primitive, for example `conv_general_dilated`, or "argument".
        phase: `argument`, `forward`, `recomputed`, `backward`, or `other` outside any gradient.
        source: `file:line` in user code, or "" if it is not known.
        is_inferred: whether `scope` is the layer of the nearest weight.
    """

    scope: str
    operation: str
    phase: str
    source: str
    is_inferred: bool = False


class Origins:
    """Finds the origins of the values of a module.

    Args:
        module: the parsed HLO module.
        argument_names: readable names of arguments, by their names in the module.
    """

    def __init__(self, module: Module, argument_names: Mapping[str, str]) -> None:
        """Indexes the computation of each instruction and the loop of each body."""
        self._module = module
        self._argument_names = argument_names
        self._home: dict[str, Computation] = {}
        self._loops: dict[str, Instruction] = {}
        self._barriers: dict[tuple[str, int], Instruction] = {}  # by what they take
        for computation in module.computations.values():
            for instruction in computation.instructions.values():
                self._home[instruction.name] = computation
                if instruction.opcode == "while":
                    for name in instruction.called["body"] + instruction.called["condition"]:
                        self._loops[name] = instruction
                elif instruction.op_name.endswith("/optimization_barrier"):
                    for operand in instruction.operands:
                        self._barriers.setdefault(_unpacked(computation, operand), instruction)

    def of(self, name: str, index: str) -> Origin | None:
        """Returns the origin of an instruction's result.

        Args:
            name: the name of the instruction.
            index: the tuple index of the result as XLA prints it: `{}`, `{1}` or `{0,1}`.

        Returns:
            The origin; `None` if no operation of the JAX program corresponds to the value.
        """
        if name not in self._home:
            return None
        position = int(index.strip("{}").split(",")[0] or 0)
        made_by = self._made_by(name, position, set())
        if made_by is None:
            return None
        op_name = _first_name(made_by)
        source = self._module.source(made_by)
        if made_by.arrays and made_by.arrays[0].dtype in _CODES:
            # JAX traces an encoder once for all values of a shape, and keeps the first one's line.
            source = self._module.source(self._barriers.get((name, position), made_by))
        if made_by.name == name and made_by.opcode == "parameter":
            return Origin(self._argument(made_by), "argument", "argument", source)
        if "/" not in op_name:
            return Origin(self._argument(made_by), "copy", "other", source)
        scope, operation = split_op_name(op_name)
        if scope:
            return Origin(scope, operation, phase(op_name), source)
        layer = self._nearest_layer(name)
        return Origin(layer, operation, phase(op_name), source, is_inferred=True)

    def _made_by(self, name: str, index: int, seen: set[tuple[str, int]]) -> Instruction | None:
        """Returns the instruction with JAX metadata that made a value, through copies and loops."""
        if (name, index) in seen:
            return None
        seen.add((name, index))
        for source, element in self._passed_on(name, index):
            found = self._made_by(source, element, seen)
            if found is not None:
                return found
        computation = self._home[name]
        instruction = computation.instructions[name]
        if instruction.opcode == "fusion" and (inner := self._inside(instruction, index, seen)):
            return inner
        is_inner = instruction.opcode == "parameter" and computation is not self._module.entry
        if instruction.op_name and not is_inner:
            return instruction
        operands = (self._made_by(operand, 0, seen) for operand in instruction.operands)
        return next((found for found in operands if found), None)

    def _passed_on(self, name: str, index: int) -> Iterator[tuple[str, int]]:
        """Returns the values that an instruction forwards unchanged, the most specific first."""
        computation = self._home[name]
        instruction = computation.instructions[name]
        operands = instruction.operands
        if instruction.opcode == "tuple":
            yield operands[index], 0
        elif instruction.opcode == "get-tuple-element":
            yield operands[0], instruction.index
        elif instruction.opcode in _MOVES or instruction.opcode.endswith("-done"):
            yield operands[0], index
        elif instruction.opcode == "dynamic-update-slice":
            yield operands[1], 0
        elif instruction.opcode == "while":
            yield self._module.computations[instruction.called["body"][0]].root.name, index
            yield operands[0], index
        elif instruction.opcode == "conditional":
            for branches in instruction.called.values():
                yield from ((self._module.computations[b].root.name, index) for b in branches)
        elif instruction.opcode == "parameter" and computation.name in self._loops:
            yield from self._passed_on(self._loops[computation.name].name, index)

    def _inside(
        self, fusion: Instruction, index: int, seen: set[tuple[str, int]]
    ) -> Instruction | None:
        """Returns the instruction that computed a fusion's result.

        For an in-place update, the update.
        """
        fused = self._module.computations[fusion.called["calls"][0]]
        inner = fused.root
        if inner.opcode == "tuple":
            inner = fused.instructions[inner.operands[index]]
        updates = False
        while inner.opcode in _MOVES or inner.opcode == "dynamic-update-slice":
            updates = updates or inner.opcode == "dynamic-update-slice"
            inner = fused.instructions[inner.operands[1 if inner.opcode.startswith("dyn") else 0]]
        if inner.opcode == "parameter" and updates:
            return self._made_by(fusion.operands[inner.index], 0, seen)
        if "/" in inner.op_name:
            return inner
        named = [i for i in fused.instructions.values() if "/" in i.op_name]
        if fusion.op_name or not named:
            return fusion if fusion.op_name else None
        return named[-1]

    def _argument(self, parameter: Instruction) -> str:
        """Returns the name of an argument of the program."""
        name = _first_name(parameter)
        return self._argument_names.get(name, name)

    def _nearest_layer(self, name: str) -> str:
        """Returns the layer whose weight is nearest upstream of an instruction."""
        computation = self._home[name]
        queue, seen = deque([name]), {name}
        while queue and len(seen) < _NEAR:
            instruction = computation.instructions[queue.popleft()]
            is_argument = instruction.opcode == "parameter"
            if is_argument and (layer := layer_of(self._argument(instruction))):
                return layer
            # The weight of a product is its last operand, so the last operand comes first.
            queue.extend(o for o in reversed(instruction.operands) if o not in seen)
            seen.update(instruction.operands)
        return ""


def _unpacked(computation: Computation, name: str) -> tuple[str, int]:
    """Returns the instruction that made a value, and its position among the results."""
    instruction = computation.instructions[name]
    while instruction.opcode in _MOVES - {"opt-barrier"}:
        instruction = computation.instructions[instruction.operands[0]]
    if instruction.opcode == "get-tuple-element":
        return instruction.operands[0], instruction.index
    return instruction.name, 0


def _first_name(instruction: Instruction) -> str:
    """Returns JAX's name of an instruction; the first one if XLA joined several."""
    return instruction.op_name.split(";")[0].replace("\\'", "'")


def split_op_name(op_name: str) -> tuple[str, str]:
    """Splits JAX's name stack into scope and primitive, and drops the scopes of transformations.

    Example:
        >>> split_op_name("jit(step)/transpose(jvp(Net))/while/body/block/conv1/add")
        ('Net/block/conv1', 'add')
    """
    plain = re.sub(r"jit\([^()]*\)", "", op_name)
    parts = [p for p in re.sub(r"\w+\(|\)", "", plain).split("/") if p]
    scopes = [p for p in parts[:-1] if not _MACHINERY.match(p)]
    # A transformed module may be there twice. An index may follow an equal one.
    unique = [p for k, p in enumerate(scopes) if k == 0 or p != scopes[k - 1] or p.isdigit()]
    return "/".join(unique), parts[-1] if parts else ""


def layer_of(argument: str) -> str:
    """Returns the layer that owns a weight, from the argument's name; "" if the name has no layer.

    Example:
        >>> layer_of("state[0]['block1']['conv']['kernel'].value")
        'block1/conv'
        >>> layer_of("model/blocks/0/up/kernel")
        'blocks/0/up'
        >>> layer_of("x")
        ''
    """
    keys = [k for k in re.split(r"[\[\]'\"./]+", argument) if k and k not in ("value", "params")]
    if not keys or keys[-1].isdigit():
        return ""
    return "/".join(dropwhile(str.isdigit, keys[1:-1]))
