// A buffer too small for what a real graph gives: refused, nothing written past it, and the context none the worse.
#include "support.h"

namespace {

using namespace test;

constexpr float canary = -12345.0f;

}  // namespace

int main(int, char ** argv) {
    const Model model = load(argv[1]);
    const int n_embd = llama_model_n_embd(model.get());
    const auto width = static_cast<size_t>(n_embd);
    const Tap tap = make_tap(layer_name(llama_model_n_layer(model.get()) - 1), n_embd);
    Context tapped(model, tap_callback(), tap.get());
    Context untapped(model, nullptr, nullptr);
    size_t bytes = 0;
    size_t tensors = 0;

    const struct {
        int tokens;
        size_t room;      // floats
        size_t expected;  // floats
    } cases[] = {
        {8, 0, 0},                    // no room at all
        {8, 8 * width - 1, 0},        // one value short
        {100, 100 * width - 1, 64 * width},  // the first micro-batch of 64 fits, the second does not
        {1, width - 1, 0},
    };
    for (const auto & c : cases) {
        Floats buffer(100 * width + 64, canary);
        hotkv_tap_begin(tap.get(), buffer.data(), c.room * sizeof(float));
        const auto tokens = some_tokens(c.tokens, 5);
        // Not an error of the context: it has appended, and where nothing was taken, its logits are right.
        const auto logits = tapped.append(0, tokens);
        const auto expected = untapped.append(0, tokens);
        CHECK(c.expected > 0 || same_bits(logits, expected));
        CHECK(tapped.state(0) == untapped.state(0));
        CHECK(hotkv_tap_end(tap.get(), &bytes, &tensors) == HOTKV_TAP_TOO_SMALL);
        CHECK(bytes == c.expected * sizeof(float));
        for (size_t i = 0; i < buffer.size(); ++i) {
            CHECK((buffer[i] == canary) == (i >= c.expected));
        }
    }

    // The same tap goes on with room enough.
    Floats buffer(width, canary);
    begin(tap, buffer);
    const auto tokens = some_tokens(1, 6);
    tapped.append(0, tokens);
    untapped.append(0, tokens);
    CHECK(tapped.state(0) == untapped.state(0));
    CHECK(hotkv_tap_end(tap.get(), &bytes, &tensors) == HOTKV_TAP_OK);
    CHECK(bytes == width * sizeof(float) && tensors == 1);

    // A tap for another width than the model's refuses the tensor.
    const Tap wider = make_tap(layer_name(1), n_embd + 1);
    Context refused(model, tap_callback(), wider.get());
    Floats untouched(2 * width, canary);
    begin(wider, untouched);
    refused.append(0, tokens);
    CHECK(hotkv_tap_end(wider.get(), &bytes, &tensors) == HOTKV_TAP_NOT_ROWS);
    CHECK(bytes == 0 && untouched == Floats(2 * width, canary));
    return 0;
}
