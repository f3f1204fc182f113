"""The staging kernels' source: one text for CUDA and ROCm.

No warp size is assumed (64 on AMD, 32 on NVIDIA), bfloat16 and float16 are 16-bit integers, and fp8 is OCP e4m3fn by
bit operations, because the fp8 hardware of MI300 speaks another dialect (FNUZ). Without a GPU the tests compile this
text with a C++ compiler and run it, threads and all.
"""

THREADS_PER_BLOCK = 256
QUANTISED_BLOCK = 256
"""Elements that share one scale; one thread block quantises them, a thread each."""

CONVERSIONS = r"""
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ inline u32 bits_of(float x) { union { float f; u32 u; } v; v.f = x; return v.u; }
__device__ inline float float_of(u32 u) { union { float f; u32 u; } v; v.u = u; return v.f; }

__device__ inline float widen_bf16(u16 x) { return float_of((u32)x << 16); }

__device__ inline u16 round_to_bf16(float x) {
    u32 u = bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

__device__ inline float widen_f16(u16 x) {
    u32 sign = (u32)(x & 0x8000u) << 16, exponent = (x >> 10) & 31u, fraction = x & 0x3ffu;
    if (exponent == 31u) return float_of(sign | 0x7f800000u | (fraction << 13));
    if (exponent) return float_of(sign | ((exponent + 112u) << 23) | (fraction << 13));
    float subnormal = (float)fraction * 5.9604644775390625e-08f;  // fraction * 2^-24
    return float_of(sign | bits_of(subnormal));
}

// Rounds the magnitude `u` (a float's bits without sign) to `kept` fraction bits, nearest even, with exponents below
// `lowest` (biased as in float) denormalised; returns the target's exponent and fraction in one integer.
__device__ inline u32 round_magnitude(u32 u, u32 kept, u32 lowest) {
    u32 exponent = u >> 23;
    u32 dropped = 23u - kept;
    if (exponent >= lowest) {
        u32 rounded = u + ((1u << (dropped - 1u)) - 1u) + ((u >> dropped) & 1u);
        return (rounded >> dropped) - ((lowest - 1u) << kept);
    }
    u32 shift = dropped + (lowest - exponent);
    if (exponent == 0u || shift > 24u) return 0u;
    u32 whole = (u & 0x7fffffu) | 0x800000u;
    return (whole + ((1u << (shift - 1u)) - 1u) + ((whole >> shift) & 1u)) >> shift;
}

__device__ inline u16 round_to_f16(float x) {
    u32 u = bits_of(x), sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return (u16)(sign | 0x7e00u);
    if (u >= 0x47800000u) return (u16)(sign | 0x7c00u);  // 65536 and above
    return (u16)(sign | round_magnitude(u, 10u, 113u));
}

__device__ inline float widen_e4m3(u8 x) {
    u32 sign = (u32)(x & 0x80u) << 24, exponent = (x >> 3) & 15u, fraction = x & 7u;
    if ((x & 0x7fu) == 0x7fu) return float_of(sign | 0x7fc00000u);
    if (exponent) return float_of(sign | ((exponent + 120u) << 23) | (fraction << 20));
    return float_of(sign | bits_of((float)fraction * 0.001953125f));  // fraction * 2^-9
}

// `x` must not exceed 448 in magnitude.
__device__ inline u8 round_to_e4m3(float x) {
    u32 u = bits_of(x), sign = (u >> 24) & 0x80u;
    return (u8)(sign | round_magnitude(u & 0x7fffffffu, 3u, 121u));
}
"""

KERNELS = r"""
#define EACH(i, n) \
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (u64)gridDim.x * blockDim.x)

extern "C" __global__ void add_bf16(float* sum, const u16* x, u64 n) { EACH(i, n) sum[i] += widen_bf16(x[i]); }
extern "C" __global__ void add_f16(float* sum, const u16* x, u64 n) { EACH(i, n) sum[i] += widen_f16(x[i]); }
extern "C" __global__ void add_f32(float* sum, const float* x, u64 n) { EACH(i, n) sum[i] += x[i]; }

extern "C" __global__ void widen_bf16_all(float* out, const u16* x, u64 n) { EACH(i, n) out[i] = widen_bf16(x[i]); }
extern "C" __global__ void widen_f16_all(float* out, const u16* x, u64 n) { EACH(i, n) out[i] = widen_f16(x[i]); }
extern "C" __global__ void round_bf16_all(u16* out, const float* x, u64 n) { EACH(i, n) out[i] = round_to_bf16(x[i]); }
extern "C" __global__ void round_f16_all(u16* out, const float* x, u64 n) { EACH(i, n) out[i] = round_to_f16(x[i]); }

// Tensor t of `count` lies at address places[t] and in the flat buffer at bytes [offsets[t], offsets[t + 1]).
extern "C" __global__ void pack(u8* flat, const u64* places, const u64* offsets, u32 count) {
    for (u32 t = blockIdx.y; t < count; t += gridDim.y) {
        const u8* source = (const u8*)places[t];
        EACH(i, offsets[t + 1] - offsets[t]) flat[offsets[t] + i] = source[i];
    }
}

extern "C" __global__ void unpack(const u8* flat, const u64* places, const u64* offsets, u32 count) {
    for (u32 t = blockIdx.y; t < count; t += gridDim.y) {
        u8* target = (u8*)places[t];
        EACH(i, offsets[t + 1] - offsets[t]) target[i] = flat[offsets[t] + i];
    }
}

// The largest magnitude of the thread block's values, on every thread; NaN if one is.
__device__ inline float block_maximum(float mine) {
    __shared__ float shared[BLOCK];
    shared[threadIdx.x] = mine;
    __syncthreads();
    for (u32 half = BLOCK / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            float a = shared[threadIdx.x], b = shared[threadIdx.x + half];
            shared[threadIdx.x] = (a != a || a >= b) ? a : b;
        }
        __syncthreads();
    }
    float maximum = shared[0];
    __syncthreads();
    return maximum;
}

// Finite for blocks of finite values; a block with an infinity or a NaN comes back as NaN, so that none is hidden.
__device__ inline float block_scale(const float* x, u64 i, u64 n, float largest) {
    float maximum = block_maximum(i < n ? float_of(bits_of(x[i]) & 0x7fffffffu) : 0.0f);
    float scale = maximum / largest;
    return scale == 0.0f ? 1.0f : scale;
}

__device__ inline int is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

extern "C" __global__ void quantise_int8(signed char* out, float* scales, const float* x, u64 n) {
    for (u64 block = blockIdx.x; block * BLOCK < n; block += gridDim.x) {
        u64 i = block * BLOCK + threadIdx.x;
        float scale = block_scale(x, i, n, 127.0f);
        if (threadIdx.x == 0) scales[block] = is_finite(scale) ? scale : float_of(0x7fc00000u);
        float quotient = i < n && is_finite(scale) ? x[i] / scale : 0.0f;
        if (i < n) out[i] = (signed char)fminf(fmaxf(rintf(quotient), -127.0f), 127.0f);
    }
}

extern "C" __global__ void dequantise_int8(float* out, const float* scales, const signed char* x, u64 n) {
    EACH(i, n) out[i] = (float)x[i] * scales[i / BLOCK];
}

extern "C" __global__ void quantise_fp8(u8* out, float* scales, const float* x, u64 n) {
    for (u64 block = blockIdx.x; block * BLOCK < n; block += gridDim.x) {
        u64 i = block * BLOCK + threadIdx.x;
        float scale = block_scale(x, i, n, 448.0f);
        if (threadIdx.x == 0) scales[block] = is_finite(scale) ? scale : float_of(0x7fc00000u);
        float quotient = i < n && is_finite(scale) ? x[i] / scale : 0.0f;
        if (i < n) out[i] = round_to_e4m3(fminf(fmaxf(quotient, -448.0f), 448.0f));
    }
}

extern "C" __global__ void dequantise_fp8(float* out, const float* scales, const u8* x, u64 n) {
    EACH(i, n) out[i] = widen_e4m3(x[i]) * scales[i / BLOCK];
}
"""


def source() -> str:
    """The whole text, to be compiled by NVRTC or hipRTC."""
    return CONVERSIONS + f"\n#define BLOCK {QUANTISED_BLOCK}\n" + KERNELS


NAMES = (
    "add_bf16",
    "add_f16",
    "add_f32",
    "widen_bf16_all",
    "widen_f16_all",
    "round_bf16_all",
    "round_f16_all",
    "pack",
    "unpack",
    "quantise_int8",
    "dequantise_int8",
    "quantise_fp8",
    "dequantise_fp8",
)


def num_blocks(num_elements: int) -> int:
    """Thread blocks that give every element a thread."""
    return -(-num_elements // THREADS_PER_BLOCK)
