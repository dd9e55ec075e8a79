// Several taps live at once, and two contexts in two threads: each takes its own rows and nobody else's.
#include <thread>

#include "support.h"

namespace {

using namespace test;

// One context whose boundary is tapped, driven call by call.
class Shard {
public:
    Shard(const Model & model, int layer, unsigned seed)
        : n_embd_(llama_model_n_embd(model.get())),
          seed_(seed),
          tap_(make_tap(layer_name(layer), n_embd_)),
          context_(model, tap_callback(), tap_.get()) {}

    void call(int n) {
        Floats buffer(static_cast<size_t>(n * n_embd_), -1.0f);
        begin(tap_, buffer);
        context_.append(0, some_tokens(n, seed_ + static_cast<unsigned>(calls_++)));
        size_t bytes = 0;
        size_t tensors = 0;
        CHECK(hotkv_tap_end(tap_.get(), &bytes, &tensors) == HOTKV_TAP_OK);
        CHECK(bytes == buffer.size() * sizeof(float));
        rows_.insert(rows_.end(), buffer.begin(), buffer.end());
    }

    const Floats & rows() const { return rows_; }

private:
    int n_embd_;
    unsigned seed_;
    int calls_ = 0;
    Floats rows_;
    Tap tap_;
    Context context_;
};

const std::vector<int> calls = {8, 1, 20, 1, 1, 1, 90, 1};

Floats alone(const Model & model, int layer, unsigned seed) {
    Shard shard(model, layer, seed);
    for (const int n : calls) {
        shard.call(n);
    }
    return shard.rows();
}

void interleaved_in_one_thread(const Model & model, const std::vector<Floats> & expected) {
    std::vector<std::unique_ptr<Shard>> shards;
    for (size_t i = 0; i < expected.size(); ++i) {
        shards.push_back(std::make_unique<Shard>(model, static_cast<int>(i), 100 * static_cast<unsigned>(i)));
    }
    for (const int n : calls) {
        for (const auto & shard : shards) {
            shard->call(n);
        }
    }
    for (size_t i = 0; i < expected.size(); ++i) {
        CHECK(same_bits(shards[i]->rows(), expected[i]));
        CHECK(i == 0 || !same_bits(expected[i], expected[i - 1]));
    }
}

void two_contexts_in_two_threads(const Model & model, const std::vector<Floats> & expected) {
    Floats results[2];
    std::thread threads[2];
    for (int i = 0; i < 2; ++i) {
        threads[i] = std::thread([&, i] {
            for (int round = 0; round < 5; ++round) {
                results[i] = alone(model, i, 100 * static_cast<unsigned>(i));
                CHECK(same_bits(results[i], expected[static_cast<size_t>(i)]));
            }
        });
    }
    for (auto & thread : threads) {
        thread.join();
    }
}

}  // namespace

int main(int, char ** argv) {
    const Model model = load(argv[1]);
    std::vector<Floats> expected;
    for (int i = 0; i < 3; ++i) {
        expected.push_back(alone(model, i, 100 * static_cast<unsigned>(i)));
    }
    interleaved_in_one_thread(model, expected);
    two_contexts_in_two_threads(model, expected);
    return 0;
}
