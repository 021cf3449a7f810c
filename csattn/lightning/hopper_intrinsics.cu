// What Hopper's matrix units and copy engine have no CUDA C names for. An emulator brings its own version of this file.
//
// Compiled for DTYPE: 0 float16, 1 bfloat16, 2 float8_e4m3fn; HEAD_DIM; COLUMNS.

typedef unsigned char u8;
typedef unsigned u32;
typedef unsigned long long u64;

constexpr int ELEMENT_BYTES = DTYPE == 2 ? 1 : 2;
constexpr int ATOM_BYTES = 128;  // of a row, that lie together in shared memory
constexpr int ATOMS = HEAD_DIM * ELEMENT_BYTES / ATOM_BYTES;
constexpr int KEYS = 64;  // of a tile: rows of one product
static_assert(HEAD_DIM * ELEMENT_BYTES % ATOM_BYTES == 0 && COLUMNS == 256, "rows are whole atoms");

// CUtensorMap: where a matrix lies, and how boxes of it are laid out in shared memory.
struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ u32 place_of(const void* shared) {
    return static_cast<u32>(__cvta_generic_to_shared(shared));
}

// A kernel may start while the one before it ends. Until this returns it reads only what no kernel of the step writes,
// and writes nothing; only after it does it let the next kernel start.
__device__ __forceinline__ void wait_for_earlier() {
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
}

// Barriers in shared memory: a phase ends when `count` have arrived and the bytes expected have come.
__device__ __forceinline__ void make_barrier(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(place_of(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_are_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(place_of(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_expecting(u64* barrier, u32 bytes) {
    const u32 place = place_of(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place), "r"(bytes) : "memory");
}
// Returns when the phase of that parity has ended: the one before the first counts as odd, and ended.
__device__ __forceinline__ void wait_for(u64* barrier, u32 parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "AGAIN:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@done bra DONE;\n\t"
        "bra AGAIN;\n"
        "DONE:\n\t}" ::"r"(place_of(barrier)),
        "r"(parity)
        : "memory");
}

// Copies that go on behind the thread's back; their bytes arrive at the barrier.
__device__ __forceinline__ void load_box(void* to, const TensorMap* map, int column, int row, u64* barrier) {
    const u32 place = place_of(to), arrival = place_of(barrier);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(place), "l"(map), "r"(column), "r"(row), "r"(arrival)
        : "memory");
}
__device__ __forceinline__ void load_bytes(void* to, const void* from, u32 bytes, u64* barrier) {
    const u32 place = place_of(to), arrival = place_of(barrier);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(place), "l"(from), "r"(bytes), "r"(arrival)
        : "memory");
}

// Registers of the calling warpgroup's threads, from now on.
template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Two warpgroups take turns: each waits for its turn, and gives the other its turn.
__device__ __forceinline__ void wait_for_turn(int group) {
    asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory");
}
__device__ __forceinline__ void give_turn_to(int group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(group + 1) : "memory");
}

// A matrix of rows of 128 bytes, as the copy engine has left it: 16 bytes are at their place ^ row % 8.
__device__ __forceinline__ u64 describe(const u8* atom) {
    constexpr u64 SWIZZLED_128 = 1ull << 62, NEXT_8_ROWS = 1024 / 16;
    return SWIZZLED_128 | NEXT_8_ROWS << 32 | 1ull << 16 | (place_of(atom) & 0x3ffff) >> 4;
}

#define OUT_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT_16(i) OUT_4(i), OUT_4(i + 4), OUT_4(i + 8), OUT_4(i + 12)
#define OUT_128 OUT_16(0), OUT_16(16), OUT_16(32), OUT_16(48), OUT_16(64), OUT_16(80), OUT_16(96), OUT_16(112)
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
        : OUT_128
        : "l"(a), "l"(b), "r"(add));
}

// Begins the products of a tile of keys and all columns. Of the result a thread has, in d[4 i + 2 r + c], row 16 warp +
// lane / 4 + 8 r and column 8 i + 2 (lane % 4) + c.
__device__ __forceinline__ void begin_products(float (&d)[128], const u8* keys, const u8* columns) {
    constexpr int PARTS = ATOM_BYTES / 32, STEPS = ATOMS * PARTS, LAST = 2;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        if (step == STEPS - LAST) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        const u8* const a = keys + step / PARTS * (KEYS * ATOM_BYTES);
        const u8* const b = columns + step / PARTS * (COLUMNS * ATOM_BYTES);
        multiply_add(d, describe(a) + step % PARTS * 2, describe(b) + step % PARTS * 2, step > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Of those, all but the last two.
__device__ __forceinline__ void wait_for_most_products() {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}
__device__ __forceinline__ void wait_for_products(float (&d)[128]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : OUT_128::"memory");
}

// The greater of the two, or NaN.
__device__ __forceinline__ float relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}
// Adds relu(x) * weight, a finite weight. Where x is not above 0 nothing is added: a maximum would be one more register
// to write for every product, and those writes hold up the matrix units.
__device__ __forceinline__ void add_positive(float& sum, float x, float weight) {
    asm("{\n\t.reg .pred positive;\n\t"
        "setp.gtu.f32 positive, %1, 0f00000000;\n\t"
        "@positive fma.rn.ftz.f32 %0, %1, %2, %0;\n\t}"
        : "+f"(sum)
        : "f"(x), "f"(weight));
}
