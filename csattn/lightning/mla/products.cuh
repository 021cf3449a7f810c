// Products in half precision by wgmma. The CPU emulator replaces this file.
//
// Compiled for HALF: bf16 or f16.
#pragma once

#include "../tensor_cores.cuh"

#define QUOTE(name) #name
#define TEXT_OF(name) QUOTE(name)
#define OPERANDS TEXT_OF(HALF) "." TEXT_OF(HALF)

// Two numbers side by side in half precision, the first in the lower bits.
__device__ __forceinline__ u32 pack(float first, float second) {
    u32 both;
    asm("cvt.rn." TEXT_OF(HALF) "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}

// result [64, 32] (+)= a [64, 16] * b [32, 16] transposed.
__device__ __forceinline__ void multiply_rows(float (&result)[16], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." OPERANDS " {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
        "}, %16, %17, add, 1, 1, 0, 0;\n}"
        : REGISTERS_8(result, 0), REGISTERS_8(result, 8)
        : "l"(a), "l"(b), "r"(add));
}

// result [64, 256] += a [64, 16] * b [16, 256].
__device__ __forceinline__ void multiply_columns(float (&result)[128], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." OPERANDS " {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, %128, %129, 1, 1, 1, 0, 1;"
        : REGISTERS_128(result)
        : "l"(a), "l"(b));
}
