"""The staging kernels' source: one text for CUDA and ROCm.

No warp size but a multiple of 32 is assumed (64 on AMD, 32 on NVIDIA), bfloat16 and float16 are 16-bit integers, and
fp8 is OCP e4m3fn by bit operations, because the fp8 hardware of MI300 speaks another dialect (FNUZ). Without a GPU the
tests compile this text with a C++ compiler and run it, threads and all.
"""

from math import log2

THREADS_PER_BLOCK = 256
QUANTISED_BLOCK = 256
"""Elements that share one scale."""
TEAM = 32
"""Threads that quantise one such block, 8 elements each: a warp on NVIDIA, half a wavefront on AMD."""
SMALLEST_MAXIMUM = 2.0**-117
"""A block with no larger magnitude becomes zeros: below, 448 over the magnitude would overflow."""
ELEMENTS_PER_THREAD = 4
WORDS_PER_THREAD = 4
"""That a thread of `pack` and `unpack` moves at a time, 16 bytes each: with one, a device is busy with starting threads."""

CONVERSIONS = r"""
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ inline u32 bits_of(float x) { union { float f; u32 u; } v; v.f = x; return v.u; }
__device__ inline float float_of(u32 u) { union { float f; u32 u; } v; v.u = u; return v.f; }

// CuPy has NVRTC flush denormals (-ftz=true, behind all options that it is given), but not where PTX says otherwise.
#if defined(__CUDACC__) && !defined(__HIP__) && !defined(__HIPCC_RTC__)
#define ARITHMETIC(name, instruction, sign) __device__ inline float name(float a, float b) \
    { float c; asm(instruction " %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
#else
#define ARITHMETIC(name, instruction, sign) __device__ inline float name(float a, float b) { return a sign b; }
#endif
ARITHMETIC(plus, "add.rn.f32", +)
ARITHMETIC(times, "mul.rn.f32", *)

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
    float subnormal = times((float)fraction, 5.9604644775390625e-08f);  // fraction * 2^-24
    return float_of(sign | bits_of(subnormal));
}

// Below 2^-14 the type's steps are all 2^-24, which is the step of floats at 2^-1.
__device__ inline u16 round_to_f16(float x) {
    u32 u = bits_of(x), sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return (u16)(sign | 0x7e00u);
    if (u >= 0x47800000u) return (u16)(sign | 0x7c00u);  // 65536 and above
    u32 subnormal = bits_of(plus(float_of(u), 0.5f)) - 0x3f000000u;
    u32 normal = ((u + 0xfffu + ((u >> 13) & 1u)) >> 13) - (112u << 10);
    return (u16)(sign | (u < 0x38800000u ? subnormal : normal));
}

__device__ inline float widen_e4m3(u8 x) {
    u32 sign = (u32)(x & 0x80u) << 24, exponent = (x >> 3) & 15u, fraction = x & 7u;
    if ((x & 0x7fu) == 0x7fu) return float_of(sign | 0x7fc00000u);
    if (exponent) return float_of(sign | ((exponent + 120u) << 23) | (fraction << 20));
    return float_of(sign | bits_of(times((float)fraction, 0.001953125f)));  // fraction * 2^-9
}

// `x` must round to no more than 448 in magnitude. Below 2^-6 the type's steps are all 2^-9, that of floats at 2^14.
__device__ inline u8 round_to_e4m3(float x) {
    u32 u = bits_of(x), sign = (u >> 24) & 0x80u;
    u &= 0x7fffffffu;
    u32 subnormal = bits_of(plus(float_of(u), 16384.0f)) - 0x46800000u;
    u32 normal = ((u + 0x7ffffu + ((u >> 20) & 1u)) >> 20) - (120u << 3);
    return (u8)(sign | (u < 0x3c800000u ? subnormal : normal));
}
"""

KERNELS = r"""
#define EACH(i, n) \
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (u64)gridDim.x * blockDim.x)

template <class T> struct alignas(4 * sizeof(T)) Four { T v[4]; };
struct alignas(16) Sixteen { u32 v[4]; };

// out[i] = f(out[i], x[i]) for all i below n, four at a time where the addresses allow it: one memory transaction of
// a thread then moves up to 16 bytes, without which a copy stays far below the memory's bandwidth.
template <class Out, class In, class F> __device__ inline void each(Out* out, const In* x, u64 n, F f) {
    bool aligned = (u64)out % sizeof(Four<Out>) == 0 && (u64)x % sizeof(Four<In>) == 0;
    u64 fours = aligned ? n / 4 : 0;
    EACH(i, fours) {
        Four<Out> o;
        if (F::reads_out) o = ((const Four<Out>*)out)[i];
        Four<In> in = ((const Four<In>*)x)[i];
        for (int k = 0; k < 4; k++) o.v[k] = f(o.v[k], in.v[k]);
        ((Four<Out>*)out)[i] = o;
    }
    EACH(j, n - 4 * fours) out[4 * fours + j] = f(out[4 * fours + j], x[4 * fours + j]);
}

template <bool reads> struct Function { static const bool reads_out = reads; };
struct AddBf16 : Function<true> { __device__ float operator()(float a, u16 x) const { return plus(a, widen_bf16(x)); } };
struct AddF16 : Function<true> { __device__ float operator()(float a, u16 x) const { return plus(a, widen_f16(x)); } };
struct AddF32 : Function<true> { __device__ float operator()(float a, float x) const { return plus(a, x); } };
struct RoundBf16 : Function<false> { __device__ u16 operator()(u16, float x) const { return round_to_bf16(x); } };
struct RoundF16 : Function<false> { __device__ u16 operator()(u16, float x) const { return round_to_f16(x); } };

extern "C" __global__ void add_bf16(float* sum, const u16* x, u64 n) { each(sum, x, n, AddBf16()); }
extern "C" __global__ void add_f16(float* sum, const u16* x, u64 n) { each(sum, x, n, AddF16()); }
extern "C" __global__ void add_f32(float* sum, const float* x, u64 n) { each(sum, x, n, AddF32()); }
extern "C" __global__ void round_bf16_all(u16* out, const float* x, u64 n) { each(out, x, n, RoundBf16()); }
extern "C" __global__ void round_f16_all(u16* out, const float* x, u64 n) { each(out, x, n, RoundF16()); }

// Copies by the widest word that both addresses are aligned to, several of a thread under way at once; the last bytes one
// by one.
template <class Word> __device__ inline void move_words(u8* to, const u8* from, u64 bytes) {
    u64 words = bytes / sizeof(Word), threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += WORDS_PER_THREAD * threads) {
        Word moved[WORDS_PER_THREAD];
        for (u32 k = 0; k < WORDS_PER_THREAD; k++)
            if (i + k * threads < words) moved[k] = ((const Word*)from)[i + k * threads];
        for (u32 k = 0; k < WORDS_PER_THREAD; k++)
            if (i + k * threads < words) ((Word*)to)[i + k * threads] = moved[k];
    }
    u64 done = bytes / sizeof(Word) * sizeof(Word);
    EACH(j, bytes - done) to[done + j] = from[done + j];
}

__device__ inline void move(u8* to, const u8* from, u64 bytes) {
    u64 both = (u64)to | (u64)from;
    if (both % 16 == 0) move_words<Sixteen>(to, from, bytes);
    else if (both % 4 == 0) move_words<u32>(to, from, bytes);
    else if (both % 2 == 0) move_words<u16>(to, from, bytes);
    else move_words<u8>(to, from, bytes);
}

// Tensor t of `count` lies at address places[t] and in the flat buffer at bytes [offsets[t], offsets[t + 1]).
extern "C" __global__ void pack(u8* flat, const u64* places, const u64* offsets, u32 count) {
    for (u32 t = blockIdx.y; t < count; t += gridDim.y)
        move(flat + offsets[t], (const u8*)places[t], offsets[t + 1] - offsets[t]);
}

extern "C" __global__ void unpack(const u8* flat, const u64* places, const u64* offsets, u32 count) {
    for (u32 t = blockIdx.y; t < count; t += gridDim.y)
        move((u8*)places[t], flat + offsets[t], offsets[t + 1] - offsets[t]);
}

#if defined(__HIP__) || defined(__HIPCC_RTC__)
#define FROM_LANE_XOR(x, mask) __shfl_xor((int)(x), (int)(mask), TEAM)
#elif defined(__CUDACC__)
#define FROM_LANE_XOR(x, mask) __shfl_xor_sync(0xffffffffu, (x), (mask), TEAM)
#endif

// A team of 32 threads, half or all of a wavefront, holds one block of 256 values: thread t the values 4t to 4t + 3 of
// both halves, so that neighbouring threads read neighbouring 16 bytes.
struct Values { float v[PER_THREAD]; };

__device__ inline u64 place_in_block(u32 k) { return (k / 4) * (4 * TEAM) + threadIdx.x % TEAM * 4 + k % 4; }

__device__ inline Values load_block(const float* x, u64 start, u64 n) {
    Values mine;
    if (start + BLOCK <= n && (u64)x % 16 == 0) {
        for (u32 k = 0; k < PER_THREAD; k += 4) {
            Four<float> four = *(const Four<float>*)(x + start + place_in_block(k));
            for (u32 j = 0; j < 4; j++) mine.v[k + j] = four.v[j];
        }
    } else {
        for (u32 k = 0; k < PER_THREAD; k++) {
            u64 i = start + place_in_block(k);
            mine.v[k] = i < n ? x[i] : 0.0f;
        }
    }
    return mine;
}

__device__ inline void store_block(u8* out, const u8* bytes, u64 start, u64 n) {
    if (start + BLOCK <= n && (u64)out % 4 == 0) {
        for (u32 k = 0; k < PER_THREAD; k += 4) {
            Four<u8> four;
            for (u32 j = 0; j < 4; j++) four.v[j] = bytes[k + j];
            *(Four<u8>*)(out + start + place_in_block(k)) = four;
        }
    } else {
        for (u32 k = 0; k < PER_THREAD; k++) {
            u64 i = start + place_in_block(k);
            if (i < n) out[i] = bytes[k];
        }
    }
}

// The bits of the block's largest magnitude, on every thread of the team. As integers an infinity is above every
// number and a NaN above that.
__device__ inline u32 largest_magnitude(const Values& mine) {
    u32 maximum = 0;
    for (u32 k = 0; k < PER_THREAD; k++) {
        u32 magnitude = bits_of(mine.v[k]) & 0x7fffffffu;
        maximum = magnitude > maximum ? magnitude : maximum;
    }
    for (u32 mask = TEAM / 2; mask > 0; mask /= 2) {
        u32 other = (u32)FROM_LANE_XOR(maximum, mask);
        maximum = other > maximum ? other : maximum;
    }
    return maximum;
}

// What is rounded is a block's value over its largest one, times `largest`: above that by two roundings at most.
struct Int8 {
    __device__ static float largest() { return 127.0f; }
    __device__ static u8 round(float x) { return (u8)(signed char)rintf(x); }
    __device__ static float widen(u8 x) { return (float)(signed char)x; }
};

struct Fp8 {
    __device__ static float largest() { return 448.0f; }
    __device__ static u8 round(float x) { return round_to_e4m3(x); }
    __device__ static float widen(u8 x) { return widen_e4m3(x); }
};

// A block with an infinity or a NaN comes back as NaN, so that none is hidden; one that is all but zero as zeros.
template <class Type> __device__ inline void quantise(u8* out, float* scales, const float* x, u64 n) {
    u64 teams = (u64)gridDim.x * (blockDim.x / TEAM);
    for (u64 block = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / TEAM; block * BLOCK < n; block += teams) {
        Values mine = load_block(x, block * BLOCK, n);
        u32 maximum = largest_magnitude(mine);
        bool finite = maximum < 0x7f800000u, vanishes = maximum < SMALLEST_MAXIMUM;
        float scale = vanishes ? 1.0f : float_of(maximum) / Type::largest();
        float inverse = vanishes ? 0.0f : Type::largest() / float_of(maximum);
        u8 bytes[PER_THREAD];
        for (u32 k = 0; k < PER_THREAD; k++) bytes[k] = Type::round(finite ? times(mine.v[k], inverse) : 0.0f);
        store_block(out, bytes, block * BLOCK, n);
        if (threadIdx.x % TEAM == 0) scales[block] = finite ? scale : float_of(0x7fc00000u);
    }
}

// Four bytes at a time; a block of 256 holds whole fours, so one scale serves them.
template <class Type> __device__ inline void dequantise(float* out, const float* scales, const u8* x, u64 n) {
    u64 fours = (u64)out % 16 == 0 && (u64)x % 4 == 0 ? n / 4 : 0;
    EACH(i, fours) {
        Four<u8> in = ((const Four<u8>*)x)[i];
        float scale = scales[i / (BLOCK / 4)];
        Four<float> o;
        for (int k = 0; k < 4; k++) o.v[k] = times(Type::widen(in.v[k]), scale);
        ((Four<float>*)out)[i] = o;
    }
    EACH(j, n - 4 * fours) {
        u64 i = 4 * fours + j;
        out[i] = times(Type::widen(x[i]), scales[i / BLOCK]);
    }
}

extern "C" __global__ void quantise_int8(u8* o, float* s, const float* x, u64 n) { quantise<Int8>(o, s, x, n); }
extern "C" __global__ void quantise_fp8(u8* o, float* s, const float* x, u64 n) { quantise<Fp8>(o, s, x, n); }
extern "C" __global__ void dequantise_int8(float* o, const float* s, const u8* x, u64 n) { dequantise<Int8>(o, s, x, n); }
extern "C" __global__ void dequantise_fp8(float* o, const float* s, const u8* x, u64 n) { dequantise<Fp8>(o, s, x, n); }
"""


# No fused multiply-add: the reference rounds product and sum one after the other.
COMPILE_OPTIONS = {"nvidia": ("--fmad=false",), "amd": ("-ffp-contract=off",)}


def source() -> str:
    """The whole text, to be compiled by NVRTC or hipRTC."""
    constants = {
        "BLOCK": QUANTISED_BLOCK,
        "TEAM": TEAM,
        "PER_THREAD": QUANTISED_BLOCK // TEAM,
        "WORDS_PER_THREAD": WORDS_PER_THREAD,
        "SMALLEST_MAXIMUM": hex((127 + int(log2(SMALLEST_MAXIMUM))) << 23) + "u",
    }
    return CONVERSIONS + "".join(f"\n#define {name} {value}" for name, value in constants.items()) + "\n" + KERNELS


NAMES = (
    "add_bf16",
    "add_f16",
    "add_f32",
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
    """Thread blocks that give every four elements a thread."""
    return -(-num_elements // (ELEMENTS_PER_THREAD * THREADS_PER_BLOCK))
