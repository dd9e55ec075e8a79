// Sequences of one context in streams: no bit of one depends on what another holds, or on its going.
#include "support.h"

namespace {

using namespace test;

constexpr llama_seq_id a = 1;
constexpr llama_seq_id b = 0;

Floats operator+(Floats left, const Floats & right) {
    left.insert(left.end(), right.begin(), right.end());
    return left;
}

// The rows of sequence `a` in a fixed schedule, prefilled apart and decoded in one call with `b`.
Floats beside(const Model & model, unsigned seed_of_b) {
    Context context(model, nullptr, nullptr, 2);
    const auto n_vocab = static_cast<std::ptrdiff_t>(llama_vocab_n_tokens(llama_model_get_vocab(model.get())));
    const auto tokens_of_b = some_tokens(60, seed_of_b);
    context.append(b, {tokens_of_b.begin(), tokens_of_b.begin() + 40});
    Floats rows = context.append(a, some_tokens(70, 1));
    for (unsigned i = 0; i < 10; ++i) {
        const auto both = context.append({{b, {tokens_of_b[40 + i]}}, {a, some_tokens(1, 50 + i)}});
        rows = rows + Floats(both.begin() + n_vocab, both.end());
    }
    return rows;
}

void the_neighbours_content_changes_nothing(const Model & model) {
    const auto rows = beside(model, 2);
    CHECK(same_bits(rows, beside(model, 3)));
    CHECK(same_bits(rows, beside(model, 4)));
}

void own_calls_are_as_alone(const Model & model) {
    Context shared(model, nullptr, nullptr, 2);
    Context single(model, nullptr, nullptr, 2);
    for (unsigned i = 0; i < 6; ++i) {
        const int n = i % 2 == 0 ? 20 : 1;
        shared.append(b, some_tokens(n, 10 + i));
        CHECK(same_bits(shared.append(a, some_tokens(n, i)), single.append(a, some_tokens(n, i))));
    }
}

void removing_one_leaves_the_other(const Model & model) {
    Context cut(model, nullptr, nullptr, 2);
    Context kept(model, nullptr, nullptr, 2);
    for (Context * context : {&cut, &kept}) {
        context->append(b, some_tokens(50, 7));
        context->append(a, some_tokens(50, 8));
    }
    const auto before = cut.state(a);
    cut.remove(b);
    CHECK(cut.length(b) == 0 && cut.length(a) == 50);
    CHECK(cut.state(a) == before && before.size() > 1000);
    CHECK(same_bits(cut.append(a, some_tokens(5, 9)), kept.append(a, some_tokens(5, 9))));

    // The next tenant of the slot finds it as new.
    Context fresh(model, nullptr, nullptr, 2);
    CHECK(same_bits(cut.append(b, some_tokens(30, 11)), fresh.append(b, some_tokens(30, 11))));
    CHECK(same_bits(cut.append(a, {42}), kept.append(a, {42})));
}

}  // namespace

int main(int, char ** argv) {
    const Model model = load(argv[1]);
    the_neighbours_content_changes_nothing(model);
    own_calls_are_as_alone(model);
    removing_one_leaves_the_other(model);
    return 0;
}
