// Prints the instruction sets that this machine supports, for CMakeLists.txt: the most basic first, the best last.

#include <cstdio>

#if defined(__x86_64__)
#include "machine_x86.cpp"
#else
#include "machine_arm.cpp"
#endif

int main() {
#if defined(__x86_64__)
    if (quire_runs_avx2()) puts("avx2");
    if (quire_runs_amx_emulated()) puts("amx_emulated");
    if (quire_runs_avx512()) puts("avx512");
    if (quire_runs_avx512_bf16()) puts("avx512_bf16");
    if (quire_amx_refusal() == NOT_COMPILED) puts("amx");
#else
    if (quire_runs_neon()) puts("neon");
    if (quire_runs_neon_dot()) puts("neon_dot");
    if (quire_runs_neon_bf16()) puts("neon_bf16");
#endif
}
