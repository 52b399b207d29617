// Detection of the instruction sets that an x86-64 processor and its operating system support.

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "params.h"

extern "C" __attribute__((weak)) int32_t quire_amx_adds_as_documented(void);  // defined if the ISA amx was compiled

namespace {

// The reason why AMX is not used. quire/ops/native.py has the error messages.
enum Refusal : int32_t { NONE, NO_AVX512_BF16, NO_PROCESSOR, NO_SYSTEM, NO_PERMISSION, OTHER_SUMS, NOT_COMPILED };

bool has_tiles() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d >> 22 & 1) && (d >> 24 & 3) == 3;  // AMX-BF16, AMX-TILE, AMX-INT8
}

// Not all compilers' __builtin_cpu_supports know this name.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

// Whether the system saves the tiles on a context switch: bits 17 and 18 of XCR0.
bool saves_tiles() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // OSXSAVE
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low >> 17 & 3) == 3;
}

// Request permission to use tiles, once for all threads of this process. Without it, the first tile instruction would end the process.
bool is_permitted() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

}  // namespace

extern "C" {

QUIRE_EXPORT int32_t quire_runs_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
QUIRE_EXPORT int32_t quire_runs_avx512(void) {
    return quire_runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
}
QUIRE_EXPORT int32_t quire_runs_amx_emulated(void) { return quire_runs_avx512(); }
QUIRE_EXPORT int32_t quire_runs_avx512_bf16(void) {
    return quire_runs_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

QUIRE_EXPORT int32_t quire_amx_refusal(void) {
    if (!quire_runs_avx512_bf16()) return NO_AVX512_BF16;
    if (!has_tiles()) return NO_PROCESSOR;
    if (!saves_tiles()) return NO_SYSTEM;
    if (!is_permitted()) return NO_PERMISSION;
    if (!quire_amx_adds_as_documented) return NOT_COMPILED;
    return quire_amx_adds_as_documented() ? NONE : OTHER_SUMS;
}
QUIRE_EXPORT int32_t quire_runs_amx(void) { return quire_amx_refusal() == NONE; }

// Write the vendor's name: 12 letters and a zero, 13 bytes.
QUIRE_EXPORT void quire_vendor(char* to) {
    unsigned a, b, c, d;
    memset(to, 0, 13);
    if (!__get_cpuid(0, &a, &b, &c, &d)) return;
    memcpy(to, &b, 4), memcpy(to + 4, &d, 4), memcpy(to + 8, &c, 4);
}

}  // extern "C"
