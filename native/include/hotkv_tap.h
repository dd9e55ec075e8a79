/* The boundary tap: copies one named tensor of each evaluated graph into a buffer of the caller's.
 *
 * It is a cb_eval callback for llama.cpp's context parameters, so that a shard reads the hidden states at the end of
 * its layers with no Python in the graph walk.  It knows nothing of llama.cpp: no header, no struct.  A tensor is an
 * opaque pointer, and what is to be known of one is asked through the functions handed over at creation.
 *
 * A tap belongs to one context, and is used by one thread at a time.  Taps share nothing: there are no globals.
 */
#ifndef HOTKV_TAP_H
#define HOTKV_TAP_H

#include <stdbool.h>
#include <stddef.h>

#if defined(_WIN32)
#define HOTKV_TAP_API __declspec(dllexport)
#else
#define HOTKV_TAP_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Changes with every change of what follows. */
#define HOTKV_TAP_ABI 2

/* Longest name of a tensor with its terminator: GGML_MAX_NAME. */
#define HOTKV_TAP_MAX_NAME 64

typedef struct hotkv_tap hotkv_tap;

/* The accessors of ggml that the tap calls; each is the address of the function of that name. */
typedef struct {
    const char * (*ggml_get_name)(const void * tensor);
    size_t (*ggml_nbytes)(const void * tensor);
    size_t (*ggml_element_size)(const void * tensor);
    bool (*ggml_is_contiguous)(const void * tensor);
    void (*ggml_backend_tensor_get)(const void * tensor, void * data, size_t offset, size_t size);
} hotkv_tap_ggml;

/* What became of the tensors since hotkv_tap_begin.  After anything but OK, nothing more is taken until then. */
enum {
    HOTKV_TAP_OK = 0,
    HOTKV_TAP_TOO_SMALL = 1, /* a tensor was larger than the room left: none of it was written */
    HOTKV_TAP_NOT_ROWS = 2,  /* a tensor was not contiguous 4-byte elements in rows of the width given */
};

/* Return HOTKV_TAP_ABI as it was when the library was built. */
HOTKV_TAP_API int hotkv_tap_abi(void);

/* Return a tap for the tensor `name`, whose rows are `row_bytes` wide; it takes nothing before hotkv_tap_begin.
 * NULL: the name is empty or too long, row_bytes is no positive multiple of 4, a function is missing, or memory is. */
HOTKV_TAP_API hotkv_tap * hotkv_tap_create(const char * name, size_t row_bytes, const hotkv_tap_ggml * ggml);

/* Free the tap.  The context that calls it must be gone before.  NULL is ignored. */
HOTKV_TAP_API void hotkv_tap_free(hotkv_tap * tap);

/* Forget what was taken, and take from now on into `buffer`, one tensor behind the other: a call to llama.cpp may
 * evaluate several micro-batches.  Nothing is written past `capacity` bytes.  NULL: take nothing. */
HOTKV_TAP_API void hotkv_tap_begin(hotkv_tap * tap, void * buffer, size_t capacity);

/* Take nothing more; return what became of the tensors since hotkv_tap_begin, with the bytes written and the tensors
 * they came from; `tensors` may be NULL. */
HOTKV_TAP_API int hotkv_tap_end(hotkv_tap * tap, size_t * bytes, size_t * tensors);

/* The callback itself; `user_data` is the tap.  A tensor that was taken ends the evaluation of its part of the graph:
 * behind a shard's last layer comes only the head, which nobody reads.  So tap the last layer: of later ones the KV would
 * be left as it was, and llama.cpp calls that a success.  A tensor that was refused ends nothing; whoever called
 * llama.cpp asks hotkv_tap_end. */
HOTKV_TAP_API bool hotkv_tap_callback(void * tensor, bool ask, void * user_data);

#ifdef __cplusplus
}
#endif

#endif
