// Keeps what a newer compiler builds at the floor of PyTorch's own wheels: glibc 2.28 and the libstdc++ of GCC 8. The other
// symbol that needs it is in vmath.h; `make wheel` fails when there is a third.

#include <new>

#ifdef __GLIBCXX__
namespace std {
// The headers of GCC 11 and later call this for a vector of more elements than there are addresses. Older libraries lack it.
[[noreturn]] void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif
