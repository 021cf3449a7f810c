// Products of a tile of keys by wgmma, and the TMA loads that feed them. The CPU emulator replaces this file.
#pragma once

#include "../tensor_cores.cuh"
#include "tiles.cuh"

// CUtensorMap: where a matrix lies, and how boxes of it are laid out in shared memory.
struct alignas(64) TensorMap {
    u64 words[16];
};

// Asynchronous TMA load of a box, counted by the mbarrier. Swizzle: a row's 16-byte unit u is stored at u ^ row % 8.
__device__ __forceinline__ void load_box(void* to, const TensorMap* map, int column, int row, u64* barrier) {
    const u32 place = shared_address(to), arrival = shared_address(barrier);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(place), "l"(map), "r"(column), "r"(row), "r"(arrival)
        : "memory");
}

// Two warpgroups take turns, by named barriers: each waits for its turn, and gives the other its turn.
__device__ __forceinline__ void wait_for_turn(int group) {
    asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory");
}
__device__ __forceinline__ void give_turn_to(int group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(group + 1) : "memory");
}

#if DTYPE == 2
#define SHAPE_AND_TYPES "m64n256k32.f32.e4m3.e4m3"
#define SIGNS_AND_TURNS "1, 1"
#else
#define SHAPE_AND_TYPES "m64n256k16.f32." TYPE_NAME "." TYPE_NAME
#define SIGNS_AND_TURNS "1, 1, 0, 0"
#if DTYPE == 1
#define TYPE_NAME "bf16"
#else
#define TYPE_NAME "f16"
#endif
#endif

__device__ __forceinline__ void multiply_add(float (&d)[128], u64 a, u64 b, int add) {
    asm volatile(
        "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %130, 0;\n\t"
        "wgmma.mma_async.sync.aligned." SHAPE_AND_TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, add, " SIGNS_AND_TURNS ";\n\t}"
        : REGISTERS_128(d)
        : "l"(a), "l"(b), "r"(add));
}

// Starts the products of a key tile with all columns, as two wgmma groups: the last two steps are the second. A thread
// gets, in d[4 i + 2 r + c], row 16 warp + lane / 4 + 8 r and column 8 i + 2 (lane % 4) + c.
__device__ __forceinline__ void multiply_tile(float (&d)[128], const u8* keys, const u8* columns) {
    constexpr int PARTS = ATOM_BYTES / 32, STEPS = ATOMS * PARTS, LAST = 2;
    begin_products();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        if (step == STEPS - LAST) end_products();
        const u64 a = operand_descriptor(shared_address(keys + step / PARTS * (KEYS * ATOM_BYTES)));
        const u64 b = operand_descriptor(shared_address(columns + step / PARTS * (COLUMNS * ATOM_BYTES)));
        multiply_add(d, a + step % PARTS * 2, b + step % PARTS * 2, step > 0);
    }
    end_products();
}

// Adds relu(x) * weight, for a finite weight. Predicated on x > 0 (or NaN), since a maximum would write one more
// register for every product, and such writes delay wgmma.
__device__ __forceinline__ void add_positive(float& sum, float x, float weight) {
    asm("{\n\t.reg .pred positive;\n\t"
        "setp.gtu.f32 positive, %1, 0f00000000;\n\t"
        "@positive fma.rn.ftz.f32 %0, %1, %2, %0;\n\t}"
        : "+f"(sum)
        : "f"(x), "f"(weight));
}
