// What the test programs share: checks that say where they failed, and llama.cpp objects that end with their scope.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "hotkv_tap.h"

namespace test {

using Floats = std::vector<float>;
using Tokens = std::vector<llama_token>;

inline bool same_bits(const Floats & a, const Floats & b) {
    return a.size() == b.size() && !a.empty() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Tokens that differ from seed to seed; the tiny model has more than 256.
inline Tokens some_tokens(int n, unsigned seed) {
    Tokens tokens;
    unsigned state = seed * 2654435761u + 1;
    for (int i = 0; i < n; ++i) {
        state = state * 1664525u + 1013904223u;
        tokens.push_back(static_cast<llama_token>(3 + (state >> 16) % 250));
    }
    return tokens;
}

inline std::string layer_name(int layer) {
    return "l_out-" + std::to_string(layer);
}

struct FreeModel {
    void operator()(llama_model * model) const { llama_model_free(model); }
};
struct FreeContext {
    void operator()(llama_context * context) const { llama_free(context); }
};
struct FreeBatch {
    void operator()(llama_batch_ext * batch) const { llama_batch_ext_free(batch); }
};
struct FreeTap {
    void operator()(hotkv_tap * tap) const { hotkv_tap_free(tap); }
};
using Model = std::unique_ptr<llama_model, FreeModel>;
using Tap = std::unique_ptr<hotkv_tap, FreeTap>;

inline Model load(const char * path) {
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            std::fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();
    auto params = llama_model_default_params();
    params.n_gpu_layers = 0;
    Model model(llama_model_load_from_file(path, params));
    CHECK(model != nullptr);
    return model;
}

// The functions that a caller without ggml's headers would look up by name.
inline hotkv_tap_ggml ggml_functions() {
    return {
        [](const void * t) { return ggml_get_name(static_cast<const ggml_tensor *>(t)); },
        [](const void * t) { return ggml_nbytes(static_cast<const ggml_tensor *>(t)); },
        [](const void * t) { return ggml_element_size(static_cast<const ggml_tensor *>(t)); },
        [](const void * t) { return ggml_is_contiguous(static_cast<const ggml_tensor *>(t)); },
        [](const void * t, void * data, size_t offset, size_t size) {
            ggml_backend_tensor_get(static_cast<const ggml_tensor *>(t), data, offset, size);
        },
    };
}

inline Tap make_tap(const std::string & name, int n_embd) {
    const auto functions = ggml_functions();
    Tap tap(hotkv_tap_create(name.c_str(), sizeof(float) * static_cast<size_t>(n_embd), &functions));
    CHECK(tap != nullptr);
    return tap;
}

inline void begin(const Tap & tap, Floats & buffer) {
    hotkv_tap_begin(tap.get(), buffer.data(), buffer.size() * sizeof(float));
}

inline ggml_backend_sched_eval_callback tap_callback() {
    return [](ggml_tensor * tensor, bool ask, void * tap) { return hotkv_tap_callback(tensor, ask, tap); };
}

// A context in the layout that hotkv-trio uses, with a callback.
class Context {
public:
    Context(const Model & model, ggml_backend_sched_eval_callback callback, void * user_data, uint32_t n_seq = 1,
            uint32_t n_ubatch = 64)
        : model_(model.get()) {
        auto params = llama_context_default_params();
        params.n_ctx = 256 * n_seq;
        params.n_batch = 256;
        params.n_ubatch = n_ubatch;
        params.n_seq_max = n_seq;
        params.n_threads = 1;
        params.n_threads_batch = 1;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        params.swa_full = true;
        params.kv_unified = false;
        params.cb_eval = callback;
        params.cb_eval_user_data = user_data;
        context_.reset(llama_init_from_model(model_, params));
        CHECK(context_ != nullptr);
        batch_.reset(llama_batch_ext_init(context_.get()));
        CHECK(batch_ != nullptr);
    }

    // Append each sequence's tokens to it in one call; every token gives logits: all rows, in the order of the calls.
    Floats append(const std::vector<std::pair<llama_seq_id, Tokens>> & parts) {
        llama_batch_ext_clear(batch_.get());
        size_t n = 0;
        for (const auto & [sequence, tokens] : parts) {
            llama_pos position = length(sequence);
            for (const llama_token token : tokens) {
                const int32_t index = llama_batch_ext_add_token(batch_.get(), sequence, token);
                CHECK(index >= 0);
                CHECK(llama_batch_ext_set_pos(batch_.get(), index, &position));
                CHECK(llama_batch_ext_set_output_logits(batch_.get(), index, true));
                ++position;
                ++n;
            }
        }
        CHECK(llama_process(context_.get(), LLAMA_PROCESS_TYPE_DECODE, batch_.get()) == 0);
        const auto width = static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model_)));
        const float * logits = llama_get_logits(context_.get());
        return Floats(logits, logits + n * width);
    }
    Floats append(llama_seq_id sequence, const Tokens & tokens) { return append({{sequence, tokens}}); }

    llama_pos length(llama_seq_id sequence) const { return llama_memory_seq_pos_max(memory(), sequence) + 1; }

    void remove(llama_seq_id sequence) { CHECK(llama_memory_seq_rm(memory(), sequence, -1, -1)); }

    // The sequence's KV, as llama.cpp saves it.
    std::vector<unsigned char> state(llama_seq_id sequence) {
        std::vector<unsigned char> bytes(llama_state_seq_get_size(context_.get(), sequence));
        CHECK(llama_state_seq_get_data(context_.get(), bytes.data(), bytes.size(), sequence) == bytes.size());
        return bytes;
    }

private:
    llama_memory_t memory() const { return llama_get_memory(context_.get()); }

    llama_model * model_;
    std::unique_ptr<llama_context, FreeContext> context_;
    std::unique_ptr<llama_batch_ext, FreeBatch> batch_;
};

// Reads a tensor as one would with ggml's headers: by its fields, from its memory.  Independent of the tap.
struct Reader {
    std::string name;
    Floats rows;

    static bool callback(ggml_tensor * tensor, bool ask, void * user_data) {
        auto & self = *static_cast<Reader *>(user_data);
        if (self.name != tensor->name) {
            return !ask;
        }
        if (!ask) {
            CHECK(tensor->type == GGML_TYPE_F32);
            const auto * data = static_cast<const float *>(tensor->data);
            self.rows.insert(self.rows.end(), data, data + ggml_nelements(tensor));
        }
        return true;
    }
};

}  // namespace test
