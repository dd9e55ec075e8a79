// The tap's rows equal the graph's own, bit for bit, in prefill and decode, in one micro-batch and in several; and what
// it leaves out behind the last layer is no KV.
#include "support.h"

namespace {

using namespace test;

struct Both {
    hotkv_tap * tap;
    Reader reader;

    static bool callback(ggml_tensor * tensor, bool ask, void * user_data) {
        auto & self = *static_cast<Both *>(user_data);
        const bool by_tap = hotkv_tap_callback(tensor, ask, self.tap);
        const bool by_reader = Reader::callback(tensor, ask, &self.reader);
        CHECK(!ask || by_tap == by_reader);
        return by_reader;  // The graph goes on here.
    }
};

Floats taken(const Tap & tap, const Floats & buffer, size_t tensors) {
    size_t bytes = 0;
    size_t count = 0;
    CHECK(hotkv_tap_end(tap.get(), &bytes, &count) == HOTKV_TAP_OK);
    CHECK(count == tensors);
    return Floats(buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(bytes / sizeof(float)));
}

void check_layer(const Model & model, int layer, bool is_last) {
    const int n_embd = llama_model_n_embd(model.get());
    Tap beside = make_tap(layer_name(layer), n_embd);
    Tap alone = make_tap(layer_name(layer), n_embd);
    Both both{beside.get(), {layer_name(layer), {}}};
    Context with_reader(model, Both::callback, &both);
    Context with_tap(model, tap_callback(), alone.get());
    Context without(model, nullptr, nullptr);

    for (const int n : {1, 8, 40, 64, 100, 1, 1}) {  // 100 tokens are two micro-batches of at most 64
        const auto tokens = some_tokens(n, static_cast<unsigned>(n));
        Floats one(static_cast<size_t>(n * n_embd), -1.0f);
        Floats two(static_cast<size_t>(n * n_embd), -2.0f);
        both.reader.rows.clear();
        begin(beside, one);
        begin(alone, two);
        const auto logits = with_reader.append(0, tokens);
        with_tap.append(0, tokens);
        CHECK(same_bits(logits, without.append(0, tokens)));  // looking on changes nothing
        CHECK(!is_last || with_tap.state(0) == without.state(0));
        const size_t tensors = n > 64 ? 2 : 1;
        CHECK(both.reader.rows.size() == static_cast<size_t>(n * n_embd));
        CHECK(same_bits(taken(beside, one, tensors), both.reader.rows));
        CHECK(same_bits(taken(alone, two, tensors), both.reader.rows));
    }
    // Nothing asked for: the whole graph, on the KV of calls that were cut short.
    hotkv_tap_begin(alone.get(), nullptr, 0);
    const auto tokens = some_tokens(3, 3);
    CHECK(!is_last || same_bits(with_tap.append(0, tokens), without.append(0, tokens)));
}

}  // namespace

int main(int, char ** argv) {
    const Model model = load(argv[1]);
    const int last = llama_model_n_layer(model.get()) - 1;
    for (const int layer : {0, last / 2, last}) {
        check_layer(model, layer, layer == last);
    }
    return 0;
}
