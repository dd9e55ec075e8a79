#include "hotkv_tap.h"

#include <cstring>
#include <new>

struct hotkv_tap {
    char name[HOTKV_TAP_MAX_NAME];
    size_t row_bytes;
    hotkv_tap_ggml ggml;

    unsigned char * buffer;
    size_t capacity;
    size_t bytes;
    size_t tensors;
    int status;
};

namespace {

// The names of a graph's tensors lie one behind the other, some 370 bytes apart, and the weights have driven them out of
// the caches.  Fetching one some tensors ahead halves what the walk costs; the address may be anybody's, it is a hint.
void fetch_ahead(const char * name) {
#if defined(__GNUC__)
    __builtin_prefetch(name + 8 * 370);
#else
    (void) name;
#endif
}

int take(hotkv_tap & tap, const void * tensor) {
    const size_t size = tap.ggml.ggml_nbytes(tensor);
    if (tap.ggml.ggml_element_size(tensor) != sizeof(float) || !tap.ggml.ggml_is_contiguous(tensor) ||
        size % tap.row_bytes != 0) {
        return HOTKV_TAP_NOT_ROWS;
    }
    if (size > tap.capacity - tap.bytes) {
        return HOTKV_TAP_TOO_SMALL;
    }
    tap.ggml.ggml_backend_tensor_get(tensor, tap.buffer + tap.bytes, 0, size);
    tap.bytes += size;
    tap.tensors += 1;
    return HOTKV_TAP_OK;
}

}  // namespace

int hotkv_tap_abi(void) {
    return HOTKV_TAP_ABI;
}

hotkv_tap * hotkv_tap_create(const char * name, size_t row_bytes, const hotkv_tap_ggml * ggml) {
    if (name == nullptr || ggml == nullptr || ggml->ggml_get_name == nullptr || ggml->ggml_nbytes == nullptr ||
        ggml->ggml_element_size == nullptr || ggml->ggml_is_contiguous == nullptr ||
        ggml->ggml_backend_tensor_get == nullptr) {
        return nullptr;
    }
    const size_t length = std::strlen(name);
    if (length == 0 || length >= HOTKV_TAP_MAX_NAME || row_bytes == 0 || row_bytes % sizeof(float) != 0) {
        return nullptr;
    }
    auto * tap = new (std::nothrow) hotkv_tap{};
    if (tap != nullptr) {
        std::memcpy(tap->name, name, length + 1);
        tap->row_bytes = row_bytes;
        tap->ggml = *ggml;
    }
    return tap;
}

void hotkv_tap_free(hotkv_tap * tap) {
    delete tap;
}

void hotkv_tap_begin(hotkv_tap * tap, void * buffer, size_t capacity) {
    tap->buffer = static_cast<unsigned char *>(buffer);
    tap->capacity = capacity;
    tap->bytes = 0;
    tap->tensors = 0;
    tap->status = HOTKV_TAP_OK;
}

int hotkv_tap_end(hotkv_tap * tap, size_t * bytes, size_t * tensors) {
    tap->buffer = nullptr;
    *bytes = tap->bytes;
    if (tensors != nullptr) {
        *tensors = tap->tensors;
    }
    return tap->status;
}

bool hotkv_tap_callback(void * tensor, bool ask, void * user_data) {
    auto & tap = *static_cast<hotkv_tap *>(user_data);
    if (ask) {
        // Called for every node of the graph; whatever is said yes to here ends a part that is computed by itself.
        if (tap.buffer == nullptr || tap.status != HOTKV_TAP_OK) {
            return false;
        }
        const char * name = tap.ggml.ggml_get_name(tensor);
        fetch_ahead(name);
        return std::strcmp(name, tap.name) == 0;
    }
    tap.status = take(tap, tensor);
    // No: what follows would be a second graph with barriers of its own, for a head that nobody reads.
    return tap.status != HOTKV_TAP_OK;
}
