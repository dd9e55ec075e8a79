// The tap on tensors that are none of ggml's: it knows a tensor only through the functions that it was given.
#include "check.h"
#include "hotkv_tap.h"

#include <cstring>
#include <string>
#include <vector>

namespace {

struct Tensor {
    const char * name;
    std::vector<float> values;
    size_t element_size = sizeof(float);
    bool contiguous = true;
};

const Tensor & as_tensor(const void * tensor) {
    return *static_cast<const Tensor *>(tensor);
}

const hotkv_tap_ggml functions = {
    [](const void * t) { return as_tensor(t).name; },
    [](const void * t) { return as_tensor(t).values.size() * sizeof(float); },
    [](const void * t) { return as_tensor(t).element_size; },
    [](const void * t) { return as_tensor(t).contiguous; },
    [](const void * t, void * data, size_t offset, size_t size) {
        std::memcpy(data, reinterpret_cast<const unsigned char *>(as_tensor(t).values.data()) + offset, size);
    },
};

constexpr size_t row_bytes = 2 * sizeof(float);

enum class Answer { unwanted, taken, refused };

// What llama.cpp's scheduler does with each node: it ends the graph where the second answer is no.
Answer evaluate(hotkv_tap * tap, Tensor & tensor) {
    if (!hotkv_tap_callback(&tensor, true, tap)) {
        return Answer::unwanted;
    }
    return hotkv_tap_callback(&tensor, false, tap) ? Answer::refused : Answer::taken;
}

void expect(hotkv_tap * tap, int status, size_t bytes, size_t tensors) {
    size_t taken = 77;
    size_t count = 77;
    CHECK(hotkv_tap_end(tap, &taken, &count) == status);
    CHECK(taken == bytes);
    CHECK(count == tensors);
}

void creation_is_checked() {
    CHECK(hotkv_tap_abi() == HOTKV_TAP_ABI);
    CHECK(hotkv_tap_create(nullptr, row_bytes, &functions) == nullptr);
    CHECK(hotkv_tap_create("", row_bytes, &functions) == nullptr);
    CHECK(hotkv_tap_create(std::string(HOTKV_TAP_MAX_NAME, 'x').c_str(), row_bytes, &functions) == nullptr);
    CHECK(hotkv_tap_create("l_out-1", 0, &functions) == nullptr);
    CHECK(hotkv_tap_create("l_out-1", 6, &functions) == nullptr);
    CHECK(hotkv_tap_create("l_out-1", row_bytes, nullptr) == nullptr);
    for (int missing = 0; missing < 5; ++missing) {
        auto some = functions;
        switch (missing) {
            case 0: some.ggml_get_name = nullptr; break;
            case 1: some.ggml_nbytes = nullptr; break;
            case 2: some.ggml_element_size = nullptr; break;
            case 3: some.ggml_is_contiguous = nullptr; break;
            default: some.ggml_backend_tensor_get = nullptr; break;
        }
        CHECK(hotkv_tap_create("l_out-1", row_bytes, &some) == nullptr);
    }
    const std::string longest(HOTKV_TAP_MAX_NAME - 1, 'x');
    hotkv_tap * tap = hotkv_tap_create(longest.c_str(), row_bytes, &functions);
    CHECK(tap != nullptr);
    hotkv_tap_free(tap);
    hotkv_tap_free(nullptr);
}

void only_the_named_tensor_is_taken_and_appended() {
    // The name is copied: the caller's may go.
    std::string name = "l_out-1";
    hotkv_tap * tap = hotkv_tap_create(name.c_str(), row_bytes, &functions);
    name = "l_out-9";
    Tensor wanted{"l_out-1", {1, 2, 3, 4}};
    Tensor longer{"l_out-14", {9, 9}};
    Tensor shorter{"l_out-", {9, 9}};
    Tensor copy{"CPU#l_out-1#0", {9, 9}};
    Tensor view{"l_out-1 (view)", {9, 9}};

    CHECK(evaluate(tap, wanted) == Answer::unwanted);  // before the first begin
    expect(tap, HOTKV_TAP_OK, 0, 0);

    std::vector<float> buffer(6, -1.0f);
    hotkv_tap_begin(tap, buffer.data(), buffer.size() * sizeof(float));
    for (Tensor * other : {&longer, &shorter, &copy, &view}) {
        CHECK(evaluate(tap, *other) == Answer::unwanted);
    }
    CHECK(evaluate(tap, wanted) == Answer::taken);
    Tensor next{"l_out-1", {5, 6}};
    CHECK(evaluate(tap, next) == Answer::taken);
    expect(tap, HOTKV_TAP_OK, 6 * sizeof(float), 2);
    CHECK((buffer == std::vector<float>{1, 2, 3, 4, 5, 6}));

    // Beginning again forgets; beginning with no buffer takes nothing.
    hotkv_tap_begin(tap, buffer.data(), buffer.size() * sizeof(float));
    expect(tap, HOTKV_TAP_OK, 0, 0);
    hotkv_tap_begin(tap, nullptr, 1000);
    CHECK(evaluate(tap, wanted) == Answer::unwanted);
    expect(tap, HOTKV_TAP_OK, 0, 0);
    hotkv_tap_free(tap);
}

void a_buffer_that_is_too_small_is_refused_whole() {
    hotkv_tap * tap = hotkv_tap_create("l_out-1", row_bytes, &functions);
    Tensor two_rows{"l_out-1", {1, 2, 3, 4}};
    Tensor one_row{"l_out-1", {5, 6}};
    for (const size_t room : {size_t{0}, size_t{4}, 4 * sizeof(float) - 1}) {
        std::vector<float> buffer(8, -1.0f);
        hotkv_tap_begin(tap, buffer.data(), room);
        CHECK(evaluate(tap, two_rows) == Answer::refused);
        CHECK(evaluate(tap, one_row) == Answer::unwanted);  // nothing more is taken, though it might fit
        expect(tap, HOTKV_TAP_TOO_SMALL, 0, 0);
        CHECK(buffer == std::vector<float>(8, -1.0f));
    }
    // The first fits, the second does not: the first stays, nothing of the second is written.
    std::vector<float> buffer(8, -1.0f);
    hotkv_tap_begin(tap, buffer.data(), 5 * sizeof(float));
    CHECK(evaluate(tap, two_rows) == Answer::taken && evaluate(tap, one_row) == Answer::refused);
    expect(tap, HOTKV_TAP_TOO_SMALL, 4 * sizeof(float), 1);
    CHECK((buffer == std::vector<float>{1, 2, 3, 4, -1, -1, -1, -1}));
    // It is as good as new afterwards.
    hotkv_tap_begin(tap, buffer.data(), buffer.size() * sizeof(float));
    CHECK(evaluate(tap, one_row) == Answer::taken);
    expect(tap, HOTKV_TAP_OK, 2 * sizeof(float), 1);
    hotkv_tap_free(tap);
}

void a_tensor_that_is_not_rows_is_refused() {
    hotkv_tap * tap = hotkv_tap_create("l_out-1", row_bytes, &functions);
    Tensor half_precision{"l_out-1", {1, 2}, 2};
    Tensor strided{"l_out-1", {1, 2}, sizeof(float), false};
    Tensor odd_width{"l_out-1", {1, 2, 3}};
    for (Tensor * tensor : {&half_precision, &strided, &odd_width}) {
        std::vector<float> buffer(8, -1.0f);
        hotkv_tap_begin(tap, buffer.data(), buffer.size() * sizeof(float));
        CHECK(evaluate(tap, *tensor) == Answer::refused);
        expect(tap, HOTKV_TAP_NOT_ROWS, 0, 0);
        CHECK(buffer == std::vector<float>(8, -1.0f));
    }
    hotkv_tap_free(tap);
}

}  // namespace

int main() {
    creation_is_checked();
    only_the_named_tensor_is_taken_and_appended();
    a_buffer_that_is_too_small_is_refused_whole();
    a_tensor_that_is_not_rows_is_refused();
    return 0;
}
