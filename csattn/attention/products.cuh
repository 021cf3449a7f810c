// Warp-level matrix instructions (ldmatrix, mma, movmatrix) on 8 x 8 matrices of ELEMENTs, bf16 or f16; each lane holds a part of
// every matrix. The emulator replaces this file.
#pragma once

#define NAME_OF(x) #x
#define NAME(x) NAME_OF(x)

__device__ void load_matrices(unsigned (&a)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}

__device__ void load_matrices_transposed(unsigned (&a)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}

__device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME(ELEMENT) "." NAME(ELEMENT) ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn." NAME(ELEMENT) "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ unsigned transpose(unsigned matrix) {
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
    return transposed;
}

__device__ float unpack(unsigned short half) {
    float x;
    asm("cvt.f32." NAME(ELEMENT) " %0, %1;" : "=f"(x) : "h"(half));
    return x;
}
