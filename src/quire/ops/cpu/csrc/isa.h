// The names of functions of one instruction set. Each source file that includes this is compiled once for each set, with QUIRE_ISA
// defined as its name. Functions that other files call contain this name; all others are internal to their file, so that the linker
// cannot confuse functions of different sets.
#pragma once

#include "params.h"

#define QUIRE_NAME_(name, isa) quire_##name##_##isa
#define QUIRE_NAME(name, isa) QUIRE_NAME_(name, isa)
#define ENTRY_OF(type, name) extern "C" QUIRE_EXPORT type QUIRE_NAME(name, QUIRE_ISA)
#define ENTRY(name) ENTRY_OF(void, name)
