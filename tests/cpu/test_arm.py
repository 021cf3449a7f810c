"""Code generated for ARM uses the intended instructions: LLVM compiles it on any machine."""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import pytest
from llvmlite import ir

from csattn.cpu import byte_lanes, waiting
from csattn.cpu.simd import I32x16

TRIPLE = "aarch64-unknown-linux-gnu"


def _assembly(cpu: str, kind: ir.FunctionType, build: Callable[..., Any]) -> str:
    """Return the assembly of a function of that type. `build` gets the builder and the function's arguments."""
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = TRIPLE
    function = ir.Function(module, kind, "function")
    builder = ir.IRBuilder(function.append_basic_block())
    result = build(builder, *function.args)
    builder.ret_void() if result is None else builder.ret(result)
    machine = llvmlite.binding.Target.from_triple(TRIPLE).create_target_machine(cpu, "+neon")
    return str(machine.emit_assembly(llvmlite.binding.parse_assembly(str(module))))


@pytest.mark.parametrize("cpu, has_dots", [("", False), ("cortex-a72", False), ("neoverse-n1", True)])
@pytest.mark.parametrize("sign", ["s", "u"])
def test_byte_products_use_dot_instructions_where_the_arm_cpu_has_them(cpu: str, has_dots: bool, sign: str) -> None:
    """The CPU's name decides: the features that LLVM reads off a running machine do not list dot products."""
    lanes, target = I32x16.llvm_type(), (TRIPLE, cpu, "+neon")
    kind = ir.FunctionType(lanes, [lanes] * 3)
    code = _assembly(cpu, kind, lambda builder, *operands: byte_lanes.add_dots(builder, target, sign, *operands))
    of_four = [f"{sign}dot"] if has_dots else [f"{sign}mull", f"{sign}mull2", "addp", f"{sign}adalp"]
    found = {name: code.count(f"\t{name}\t") for name in ("sdot", "udot", *of_four)}
    assert found == {"sdot": 0, "udot": 0} | dict.fromkeys(of_four, 4), code


def test_a_pause_on_arm_is_an_isb_instruction() -> None:
    code = _assembly("", ir.FunctionType(ir.VoidType(), []), lambda builder: waiting.add_pause(builder, TRIPLE))
    assert "\tisb\n" in code, code
