// Detection of the instruction sets of an Arm processor.

#include <cstdint>

#include "params.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace {

#if defined(__APPLE__)

bool has(const char* feature) {
    int32_t value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_byte_dot() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_bf16() { return has("hw.optional.arm.FEAT_BF16") && has("hw.optional.arm.FEAT_I8MM"); }

#else

bool has_byte_dot() {  // and the other extensions that the compiler may use with armv8.2-a
    constexpr unsigned long ALL = HWCAP_ASIMDDP | HWCAP_ATOMICS | HWCAP_ASIMDRDM | HWCAP_CRC32;
    return (getauxval(AT_HWCAP) & ALL) == ALL;
}
bool has_bf16() {
    constexpr unsigned long I8MM = 1ul << 13, BF16 = 1ul << 14;  // HWCAP2_I8MM and HWCAP2_BF16, which old headers lack
    return (getauxval(AT_HWCAP2) & (I8MM | BF16)) == (I8MM | BF16);
}

#endif

}  // namespace

extern "C" {

QUIRE_EXPORT int32_t quire_runs_neon(void) { return 1; }
QUIRE_EXPORT int32_t quire_runs_neon_dot(void) { return has_byte_dot(); }
QUIRE_EXPORT int32_t quire_runs_neon_bf16(void) { return has_byte_dot() && has_bf16(); }

// The vendor's name is empty, as nothing depends on the vendor of an Arm processor.
QUIRE_EXPORT void quire_vendor(char* to) { *to = 0; }

}  // extern "C"
