// A tool that NVTX loads as it loads Nsight (NVTX_INJECTION64_PATH): it writes the ranges of all domains into the file
// NVTX_TOOL_LOG, a line for each that begins ("+ domain: text") or ends ("- domain").
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Function)(void);
typedef struct {
    size_t size;
    int (*functions)(uint32_t module, Function*** table, unsigned* count);
} Callbacks;
typedef struct {
    uint16_t version, size;
    uint32_t category, color_type, color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char* message;  // ASCII, or what register_string returned
} Attributes;

enum { CALLBACKS = 1, CORE2 = 5, PUSH = 4, POP = 5, REGISTER_STRING = 10, CREATE_DOMAIN = 12 };

static FILE* out;

static int push(const char* domain, const Attributes* event)
{
    fprintf(out, "+ %s: %s\n", domain ? domain : "", event->message ? event->message : "");
    return fflush(out);
}

static int pop(const char* domain)
{
    fprintf(out, "- %s\n", domain ? domain : "");
    return fflush(out);
}

static void* register_string(const char* domain, const char* text) { return strdup(text); }
static void* create_domain(const char* name) { return strdup(name); }

int InitializeInjectionNvtx2(const void* (*export)(uint32_t))
{
    const Callbacks* callbacks = export(CALLBACKS);
    Function** table;
    unsigned count;
    const char* path = getenv("NVTX_TOOL_LOG");
    if (!callbacks || !path || !(out = fopen(path, "w")) || !callbacks->functions(CORE2, &table, &count)) return 0;
    *table[PUSH] = (Function)push;
    *table[POP] = (Function)pop;
    *table[REGISTER_STRING] = (Function)register_string;
    *table[CREATE_DOMAIN] = (Function)create_domain;
    return 1;
}
