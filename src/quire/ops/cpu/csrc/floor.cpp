// Keeps binaries of newer compilers compatible with the minimum of PyTorch's wheels: glibc 2.28 and the libstdc++ of GCC 8. The other
// symbol that needs a workaround is in vmath.h; `make wheel` fails if there is a third.

#include <new>

#ifdef __GLIBCXX__
namespace std {
// The headers of GCC 11 and later call this if a vector's size exceeds the address space. Older libraries do not have it.
[[noreturn]] void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif
