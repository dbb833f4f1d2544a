// Scans the text of trace events into columns; src/stepscope/readers/kineto/scanned.py calls it and says what it returns.
// What is no text is decoded beside it: events of XLA's profiles in xplane_events.hpp, rows of SQLite in sqlite_rows.hpp.
//
// It reads only what is certain to mean the same to the Python reader. Anything else makes it refuse the text (it
// returns None) or mark a group of events as odd; the Python reader then decodes these from the text. So it must never
// accept more than msgspec does, and need not accept all that msgspec does.
//
// It trusts no input: it reads up to the null byte that ends every bytes object and never past it, has no recursion,
// and lets no C++ exception out.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sqlite_rows.hpp"
#include "xplane_events.hpp"

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#define STEPSCOPE_SSE2
#if defined(_MSC_VER)
#include <intrin.h>
#endif
#endif

namespace {

using std::string_view;

constexpr long INTERFACE = 2;  // changes with what the functions take or return, also in scanned.py
constexpr int64_t NO_INTEGER = std::numeric_limits<int64_t>::min();
constexpr uint32_t NO_CODE = std::numeric_limits<uint32_t>::max();
constexpr int64_t LATEST_US = (int64_t{1} << 61) / 1000 - 1;   // as LATEST_NS in events.py
constexpr int64_t EARLIEST_US = -((int64_t{1} << 59) / 1000 - 1);
constexpr int64_t DOUBLE_LIMIT_US = int64_t{1} << 41;          // as DOUBLE_LIMIT in events.py
constexpr int64_t EXACT_DOUBLE = int64_t{1} << 53;
constexpr size_t MOST_BYTES = size_t{1} << 31;
constexpr int MOST_DEPTH = 60;
constexpr size_t MOST_GROUPS = 256;
constexpr size_t MOST_LANES = 65536;
constexpr int MOST_PROBES = 200;  // more are a file made to collide

enum class FieldType : uint8_t { integer, number, text, identifier, raw, refused };

struct Field {
    std::string key;
    FieldType type;
};

// Numbers different texts in order of first use; the texts stay where they are.
class Dictionary {
public:
    // The number of the text; NO_CODE if too many collide.
    uint32_t code(string_view text) {
        if (!entries_.empty() && entries_[last_].text == text) return last_;
        if (entries_.size() * 2 >= slots_.size()) grow();
        const uint64_t hash = hash_of(text);
        size_t slot = hash & (slots_.size() - 1);
        for (int probe = 0; probe < MOST_PROBES; ++probe) {
            const uint32_t found = slots_[slot];
            if (found == NO_CODE) {
                last_ = slots_[slot] = static_cast<uint32_t>(entries_.size());
                entries_.push_back({text, hash});
                return last_;
            }
            if (entries_[found].hash == hash && entries_[found].text == text) return last_ = found;
            slot = (slot + 1) & (slots_.size() - 1);
        }
        return NO_CODE;
    }

    // The texts as a JSON array.
    std::string json() const {
        std::string result = "[";
        for (const Entry& entry : entries_) {
            if (result.size() > 1) result += ',';
            result += entry.text;
        }
        return result += ']';
    }

    string_view operator[](uint32_t code) const { return entries_[code].text; }

private:
    struct Entry {
        string_view text;
        uint64_t hash;
    };

    static uint64_t hash_of(string_view text) {
        uint64_t hash = text.size() * 0x9E3779B97F4A7C15u;
        const char* at = text.data();
        size_t left = text.size();
        for (; left >= 8; at += 8, left -= 8) {
            uint64_t part;
            std::memcpy(&part, at, 8);
            hash = mixed(hash ^ part);
        }
        uint64_t part = 0;
        std::memcpy(&part, at, left);
        return mixed(hash ^ part);
    }

    static uint64_t mixed(uint64_t value) {
        value *= 0xD6E8FEB86659FD93u;
        return value ^ (value >> 32);
    }

    void grow() {
        slots_.assign(slots_.empty() ? 64 : slots_.size() * 4, NO_CODE);
        for (uint32_t number = 0; number < entries_.size(); ++number) {
            size_t slot = entries_[number].hash & (slots_.size() - 1);
            while (slots_[slot] != NO_CODE) slot = (slot + 1) & (slots_.size() - 1);
            slots_[slot] = number;
        }
    }

    std::vector<Entry> entries_;
    std::vector<uint32_t> slots_;
    uint32_t last_ = 0;
};

// The values of one field, in the vector of its type; empty until the first value that is not null.
struct Column {
    explicit Column(FieldType wanted) : type(wanted) {}

    void pad(size_t rows) {
        if (type == FieldType::integer) {
            integers.resize(rows, NO_INTEGER);
        } else if (type == FieldType::number) {
            numbers.resize(rows, std::numeric_limits<double>::quiet_NaN());
        } else {
            codes.resize(rows, NO_CODE);
        }
    }

    FieldType type;
    bool used = false;
    std::vector<int64_t> integers;
    std::vector<double> numbers;
    std::vector<uint32_t> codes;
    Dictionary dictionary;
};

// Lanes: pairs of a process and a thread, as written.
class Lanes {
public:
    // The number of the pair; NO_CODE if there are too many.
    uint32_t code(string_view process, string_view thread) {
        const uint32_t first = processes_.code(process), second = threads_.code(thread);
        if (first == NO_CODE || second == NO_CODE) return NO_CODE;
        const uint64_t pair = (uint64_t{first} << 32) | second;
        if (!pairs_.empty() && pairs_[last_] == pair) return last_;
        const auto [place, is_new] = codes_.try_emplace(pair, static_cast<uint32_t>(pairs_.size()));
        if (is_new) {
            if (pairs_.size() >= MOST_LANES) return NO_CODE;
            pairs_.push_back(pair);
        }
        return last_ = place->second;
    }

    std::string json() const {
        std::string result = "[";
        for (const uint64_t pair : pairs_) {
            if (result.size() > 1) result += ',';
            result += '[';
            result += processes_[static_cast<uint32_t>(pair >> 32)];
            result += ',';
            result += threads_[static_cast<uint32_t>(pair)];
            result += ']';
        }
        return result += ']';
    }

private:
    Dictionary processes_, threads_;
    std::unordered_map<uint64_t, uint32_t> codes_;
    std::vector<uint64_t> pairs_;
    uint32_t last_ = 0;
};

// Events of one phase and, if complete, one category.
struct Group {
    char phase = 0;           // X, i, s or f; 0 for all other events
    string_view category;     // as written, with quotes
    int kind = -1;            // index of the table of fields; -1: only the spans are wanted
    bool is_odd = false;      // an event has something that the Python reader must see
    std::vector<uint32_t> spans;  // where each event begins and ends in the text
    std::vector<int64_t> start_ns, duration_ns, ids;
    Dictionary names, categories;
    std::vector<uint32_t> name_codes, category_codes, lane_codes;
    Lanes lanes;
    std::vector<Column> columns;

    size_t rows() const { return start_ns.size(); }
};

struct Kind {
    std::vector<std::string> categories;
    std::vector<Field> fields;
};

struct Value {
    bool is_set = false;
    int64_t integer = 0;
    double number = 0;
    string_view token;
};

struct Time {
    bool is_set = false;
    int64_t ns = 0;
};

enum Key : int { PH, CAT, NAME, TS, DUR, PID, TID, ID, ARGS, KEYS };
constexpr string_view KEY_NAMES[KEYS] = {"\"ph\"",  "\"cat\"", "\"name\"", "\"ts\"",  "\"dur\"",
                                         "\"pid\"", "\"tid\"", "\"id\"",   "\"args\""};

// Remembers the order of an object's keys, which is the same in most objects of a kind.
struct KeyOrder {
    struct Known {
        string_view key;
        int field;
    };
    std::vector<Known> known;
};
constexpr size_t MOST_KNOWN_KEYS = 64;

class Scanner {
public:
    Scanner(string_view text, bool exact, const std::vector<Kind>& kinds, string_view instant_name)
        : text_(text), at_(text.data()), end_(text.data() + text.size()), exact_(exact), kinds_(kinds),
          instant_name_(instant_name), orders_(kinds.size()), values_(kinds.size()) {
        for (size_t kind = 0; kind < kinds.size(); ++kind) values_[kind].resize(kinds[kind].fields.size());
    }

    // Scan all events; false if the text must be read in another way.
    bool run() {
        space();
        if (at_ == end_) return true;
        if (*at_ == ']') return close();
        for (;;) {
            if (*at_ != '{' || !event()) return false;
            ++events;
            space();
            if (at_ == end_) break;
            if (*at_ == ']') return close() && is_certain();
            if (*at_ != ',') return false;
            ++at_;
            space();
        }
        return is_certain();
    }

    size_t events = 0;
    int64_t end_of_array = -1;      // where the bracket is that ends the list of events; -1 if it is not in the text
    bool needs_exact = false;       // a start is a fraction too large for a double
    std::vector<std::unique_ptr<Group>> groups;

private:
    bool close() {
        end_of_array = at_ - text_.data();
        return true;
    }

    // Whether rounding could not differ: the Python reader looks at all times of a group to choose how it converts them.
    bool is_certain() const { return exact_ || needs_exact || (!has_large_duration_ && !(has_large_ && has_fine_)); }

    void space() {
        while (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r') ++at_;
    }

    // Pass a string, from its opening quote to after its closing one; `has_escape_` tells whether it had escapes.
    bool string() {
        has_escape_ = false;
        ++at_;
        for (;;) {
            plain_characters();
            const unsigned char c = static_cast<unsigned char>(*at_);
            if (c == '"') {
                ++at_;
                return true;
            }
            if (c == '\\') {
                has_escape_ = true;
                if (!escape()) return false;
            } else if (c < 0x20 || !character()) {
                return false;
            }
        }
    }

    // Pass ASCII characters up to a quote, a backslash or a control character.
    void plain_characters() {
#ifdef STEPSCOPE_SSE2
        const __m128i quote = _mm_set1_epi8('"'), backslash = _mm_set1_epi8('\\'), blank = _mm_set1_epi8(0x20);
        while (end_ - at_ >= 16) {
            const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at_));
            const __m128i stops = _mm_or_si128(_mm_or_si128(_mm_cmpeq_epi8(part, quote), _mm_cmpeq_epi8(part, backslash)),
                                               _mm_cmplt_epi8(part, blank));  // signed: also bytes from 0x80 on
            if (const int mask = _mm_movemask_epi8(stops)) {
#if defined(_MSC_VER)
                unsigned long first;
                _BitScanForward(&first, static_cast<unsigned long>(mask));
                at_ += first;
#else
                at_ += __builtin_ctz(static_cast<unsigned>(mask));
#endif
                return;
            }
            at_ += 16;
        }
#endif
        while (*at_ >= 0x20 && *at_ != '"' && *at_ != '\\' && static_cast<unsigned char>(*at_) < 0x80) ++at_;
    }

    bool escape() {
        const char c = at_[1];  // at most the null byte that ends the text
        if (c == 'u') {
            unsigned code = 0;
            for (int digit = 2; digit < 6; ++digit) {
                const char h = at_[digit];
                if (h >= '0' && h <= '9') code = code * 16 + static_cast<unsigned>(h - '0');
                else if (h >= 'a' && h <= 'f') code = code * 16 + static_cast<unsigned>(h - 'a' + 10);
                else if (h >= 'A' && h <= 'F') code = code * 16 + static_cast<unsigned>(h - 'A' + 10);
                else return false;
            }
            if (code >= 0xD800 && code < 0xE000) return false;  // half of a character
            at_ += 6;
            return true;
        }
        if (c == '\0' || std::strchr("\"\\/bfnrt", c) == nullptr) return false;
        at_ += 2;
        return true;
    }

    // Pass one character of more than one byte; false if it is not UTF-8.
    bool character() {
        const auto byte = [this](int place) { return static_cast<unsigned char>(at_[place]); };
        const auto follows = [&](int place) { return (byte(place) & 0xC0) == 0x80; };
        const unsigned char c = byte(0);
        if (c >= 0xC2 && c < 0xE0) {
            if (!follows(1)) return false;
            at_ += 2;
        } else if (c >= 0xE0 && c < 0xF0) {
            if (!follows(1) || !follows(2) || (c == 0xE0 && byte(1) < 0xA0) || (c == 0xED && byte(1) >= 0xA0)) return false;
            at_ += 3;
        } else if (c >= 0xF0 && c < 0xF5) {
            if (!follows(1) || !follows(2) || !follows(3) || (c == 0xF0 && byte(1) < 0x90) || (c == 0xF4 && byte(1) >= 0x90)) {
                return false;
            }
            at_ += 4;
        } else {
            return false;
        }
        return true;
    }

    static bool is_digit(char c) { return c >= '0' && c <= '9'; }

    // Pass a number; `is_whole_` tells whether it is written without fraction and exponent.
    bool number() {
        is_whole_ = true;
        if (*at_ == '-') ++at_;
        if (*at_ == '0') {
            ++at_;
        } else {
            if (!is_digit(*at_)) return false;
            do ++at_; while (is_digit(*at_));
        }
        if (*at_ == '.') {
            is_whole_ = false;
            ++at_;
            if (!is_digit(*at_)) return false;
            do ++at_; while (is_digit(*at_));
        }
        if (*at_ == 'e' || *at_ == 'E') {
            is_whole_ = false;
            ++at_;
            if (*at_ == '+' || *at_ == '-') ++at_;
            if (!is_digit(*at_)) return false;
            do ++at_; while (is_digit(*at_));
        }
        return true;
    }

    bool word(string_view expected) {
        if (static_cast<size_t>(end_ - at_) < expected.size() || string_view(at_, expected.size()) != expected) return false;
        at_ += expected.size();
        return true;
    }

    bool scalar() {
        switch (*at_) {
            case '"': return string();
            case 't': return word("true");
            case 'f': return word("false");
            case 'n': return word("null");
            default: return number();
        }
    }

    // Pass the colon after a key, and the white space around it.
    bool colon() {
        space();
        if (*at_ != ':') return false;
        ++at_;
        space();
        return true;
    }

    bool key() { return *at_ == '"' && string() && colon(); }

    // Pass any value.
    bool value() {
        if (*at_ != '{' && *at_ != '[') return scalar();
        uint64_t are_objects = 0;
        int depth = 0;
        for (;;) {
            const char opening = *at_;
            if (opening == '{' || opening == '[') {
                if (depth == MOST_DEPTH) return false;
                ++depth;
                are_objects = (are_objects << 1) | (opening == '{');
                ++at_;
                space();
                if (*at_ != (opening == '{' ? '}' : ']')) {
                    if (opening == '{' && !key()) return false;
                    continue;
                }
            } else {
                if (!scalar()) return false;
                space();
            }
            while (*at_ == ((are_objects & 1) ? '}' : ']')) {
                ++at_;
                are_objects >>= 1;
                if (--depth == 0) return true;
                space();
            }
            if (*at_ != ',') return false;
            ++at_;
            space();
            if ((are_objects & 1) && !key()) return false;
        }
    }

    string_view since(const char* begin) const { return {begin, static_cast<size_t>(at_ - begin)}; }

    bool text_token(string_view& token) {
        const char* begin = at_;
        if (*at_ != '"' || !string()) return false;
        token = since(begin);
        return true;
    }

    bool identifier_token(string_view& token) {
        const char* begin = at_;
        if (*at_ == '"' ? !string() : (!number() || !is_whole_)) return false;
        token = since(begin);
        return true;
    }

    static bool integer_of(string_view token, int64_t& result) {
        const auto [place, error] = std::from_chars(token.data(), token.data() + token.size(), result);
        return error == std::errc() && place == token.data() + token.size() && result != NO_INTEGER;
    }

    static bool double_of(string_view token, double& result) {
#if defined(__cpp_lib_to_chars) && !defined(STEPSCOPE_SIMPLE_DOUBLES)
        const auto [place, error] = std::from_chars(token.data(), token.data() + token.size(), result);
        return error == std::errc() && place == token.data() + token.size();
#else
        return simple_double_of(token, result);
#endif
    }

    // A double whose digits and power of ten are both exact doubles, so that one division rounds it correctly.
    [[maybe_unused]] static bool simple_double_of(string_view token, double& result) {
        int64_t digits = 0, scale = 1;
        bool in_fraction = false;
        const bool is_negative = token[0] == '-';
        for (const char c : token.substr(is_negative)) {
            if (c == '.') {
                in_fraction = true;
                continue;
            }
            if (!is_digit(c) || digits >= EXACT_DOUBLE / 10 || scale >= EXACT_DOUBLE / 10) return false;
            digits = digits * 10 + (c - '0');
            if (in_fraction) scale *= 10;
        }
        result = static_cast<double>(digits) / static_cast<double>(scale);
        if (is_negative) result = -result;
        return true;
    }

    // Read microseconds as the Python reader does: a fraction is exact if it has at most three digits.
    bool time(Time& result, bool is_duration) {
        if (*at_ == 'n') return word("null");
        const char* begin = at_;
        const bool is_negative = *at_ == '-';
        const char* digits = at_ + is_negative;
        if (!number()) return false;
        int64_t whole = 0;
        const char* c = digits;
        for (; is_digit(*c); ++c) {
            if (whole > LATEST_US / 10) return false;
            whole = whole * 10 + (*c - '0');
        }
        if (whole > (is_negative ? -EARLIEST_US : LATEST_US)) return false;
        int64_t thousandths = 0;
        bool is_fine = false;
        if (!is_whole_) {
            if (*c != '.') return false;  // an exponent
            int place = 0;
            for (++c; is_digit(*c); ++c, ++place) {
                if (place < 3) thousandths = thousandths * 10 + (*c - '0');
                else is_fine |= *c != '0';
            }
            if (c != at_) return false;
            for (; place < 3; ++place) thousandths *= 10;
        }
        if (whole >= DOUBLE_LIMIT_US) {
            if (is_whole_) {
                has_large_ = true;
            } else {
                if (is_negative || whole == DOUBLE_LIMIT_US) return false;
                (is_duration ? has_large_duration_ : needs_exact) = true;
                if (is_fine) return false;
            }
        }
        result.is_set = true;
        result.ns = whole * 1000 + thousandths;
        if (is_negative) result.ns = -result.ns;
        if (is_fine) {
            double microseconds;
            if (exact_ || !double_of(since(begin), microseconds)) return false;
            result.ns = static_cast<int64_t>(std::nearbyint(microseconds * 1000));
            has_fine_ = true;
        }
        return true;
    }

    // The field of a key, -1 for one that is not wanted; most objects have the same keys in the same order.
    template <class Find>
    int field_of(string_view token, KeyOrder& order, size_t place, Find find) {
        if (place < order.known.size() && order.known[place].key == token) return order.known[place].field;
        const int field = find(token.substr(1, token.size() - 2));
        if (place < order.known.size()) order.known[place] = {token, field};
        else if (place == order.known.size() && place < MOST_KNOWN_KEYS) order.known.push_back({token, field});
        return field;
    }

    // Read the wanted arguments into `values_[kind]`; sets `is_odd_`. False if the text is not valid.
    bool arguments(size_t kind) {
        std::vector<Value>& values = values_[kind];
        for (Value& each : values) each.is_set = false;
        if (*at_ != '{') {
            if (*at_ != 'n') is_odd_ = true;
            return value();
        }
        ++at_;
        space();
        if (*at_ == '}') {
            ++at_;
            return true;
        }
        const std::vector<Field>& fields = kinds_[kind].fields;
        uint64_t seen = 0;
        for (size_t place = 0;; ++place) {
            string_view name;
            if (!text_token(name)) return false;
            if (has_escape_) is_odd_ = true;
            if (!colon()) return false;
            const int field = field_of(name, orders_[kind], place, [&](string_view key) {
                for (size_t index = 0; index < fields.size(); ++index) {
                    if (fields[index].key == key) return static_cast<int>(index);
                }
                return -1;
            });
            if (field < 0) {
                if (!value()) return false;
            } else {
                if (seen >> field & 1) is_odd_ = true;
                seen |= uint64_t{1} << field;
                if (!argument(fields[static_cast<size_t>(field)].type, values[static_cast<size_t>(field)])) return false;
            }
            space();
            if (*at_ == '}') break;
            if (*at_ != ',') return false;
            ++at_;
            space();
        }
        ++at_;
        return true;
    }

    bool argument(FieldType type, Value& result) {
        const char* begin = at_;
        const char first = *at_;
        if (!value()) return false;
        result.token = since(begin);
        result.is_set = first != 'n';
        const bool is_number = first == '-' || is_digit(first);
        const bool is_whole = is_number && is_whole_;
        switch (type) {
            case FieldType::integer:
                is_odd_ |= result.is_set && !(is_whole && integer_of(result.token, result.integer));
                break;
            case FieldType::number:
                is_odd_ |= result.is_set && !(is_number && double_of(result.token, result.number) &&
                                              std::fabs(result.number) < static_cast<double>(EXACT_DOUBLE));
                break;
            case FieldType::text:
                is_odd_ |= result.is_set && first != '"';
                break;
            case FieldType::identifier: {
                int64_t unused;
                is_odd_ |= result.is_set && first != '"' && !(is_whole && integer_of(result.token, unused));
                break;
            }
            case FieldType::raw:
                break;
            case FieldType::refused:
                is_odd_ |= result.is_set;
                break;
        }
        return true;
    }

    // Read one event and put it into its group.
    bool event() {
        const char* begin = at_;
        string_view token[KEYS];
        Time start, duration;
        const char* arguments_begin = nullptr;
        int parsed_kind = -1;
        is_odd_ = false;
        token[PID] = token[TID] = token[NAME] = token[CAT] = token[PH] = "\"\"";
        bool name_has_escape = false;
        unsigned seen = 0;
        ++at_;
        space();
        if (*at_ != '}') {
            for (size_t place = 0;; ++place) {
                string_view name;
                if (!text_token(name) || has_escape_ || !colon()) return false;
                const int key = field_of(name, event_order_, place, [](string_view wanted) {
                    for (int index = 0; index < KEYS; ++index) {
                        if (KEY_NAMES[index].substr(1, KEY_NAMES[index].size() - 2) == wanted) return index;
                    }
                    return -1;
                });
                if (key >= 0) {
                    if (seen >> key & 1) return false;
                    seen |= 1u << key;
                }
                switch (key) {
                    case PH:
                    case CAT:
                        if (!text_token(token[key]) || has_escape_) return false;
                        break;
                    case NAME:
                        if (!text_token(token[NAME])) return false;
                        name_has_escape = has_escape_;
                        break;
                    case TS:
                        if (!time(start, false)) return false;
                        break;
                    case DUR:
                        if (!time(duration, true)) return false;
                        break;
                    case PID:
                    case TID:
                        if (!identifier_token(token[key])) return false;
                        break;
                    case ID:
                        if (*at_ == 'n' ? !word("null") : !identifier_token(token[ID])) return false;
                        break;
                    case ARGS:
                        arguments_begin = at_;
                        parsed_kind = kind_of(token[PH], token[CAT]);
                        if (parsed_kind >= 0 ? !arguments(static_cast<size_t>(parsed_kind)) : !value()) return false;
                        break;
                    default:
                        if (!value()) return false;
                }
                space();
                if (*at_ == '}') break;
                if (*at_ != ',') return false;
                ++at_;
                space();
            }
        }
        ++at_;
        if (token[PH].size() == 3 && std::strchr("BbSEeF", token[PH][1]) != nullptr) return false;  // belong in pairs
        const int kind = kind_of(token[PH], token[CAT]);
        if (kind >= 0 && kind != parsed_kind) {  // the arguments came first, or there are none
            const char* after = at_;
            is_odd_ = false;
            at_ = arguments_begin != nullptr ? arguments_begin : "{}";
            if (!arguments(static_cast<size_t>(kind))) return false;
            at_ = after;
        }
        return add(since(begin), token, start, duration, kind, name_has_escape);
    }

    // The table of fields for an event's arguments; -1 for none.
    int kind_of(string_view phase, string_view category) {
        if (phase == "\"X\"") {
            Group* group = complete_group(category);
            return group == nullptr ? -1 : group->kind;
        }
        return phase == "\"i\"" ? static_cast<int>(kinds_.size()) - 1 : -1;
    }

    Group* complete_group(string_view category) {
        if (last_ != nullptr && last_->category == category) return last_;
        for (const auto& each : groups) {
            if (each->phase == 'X' && each->category == category) return last_ = each.get();
        }
        if (candidate_ == nullptr || candidate_->category != category) {
            candidate_ = std::make_unique<Group>();
            candidate_->phase = 'X';
            candidate_->category = category;
            set_kind(*candidate_, category.substr(1, category.size() - 2));
        }
        return candidate_.get();
    }

    void set_kind(Group& group, string_view category) {
        std::string lowered(category);
        for (char& c : lowered) {
            if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
        }
        for (size_t kind = 0; kind < kinds_.size(); ++kind) {
            for (const std::string& each : kinds_[kind].categories) {
                if (each == lowered) return set_columns(group, kind);
            }
        }
    }

    void set_columns(Group& group, size_t kind) {
        group.kind = static_cast<int>(kind);
        for (const Field& field : kinds_[kind].fields) group.columns.emplace_back(field.type);
    }

    Group* group_of_phase(char phase) {
        Group*& known = phase == 'i' ? instants_ : phase == 's' ? sources_ : phase == 'f' ? targets_ : others_;
        if (known == nullptr) {
            groups.push_back(std::make_unique<Group>());
            known = groups.back().get();
            known->phase = phase;
            if (phase == 'i') set_columns(*known, kinds_.size() - 1);
        }
        return known;
    }

    bool add(string_view span, const string_view (&token)[KEYS], const Time& start, const Time& duration, int kind,
             bool name_has_escape) {
        const char phase = token[PH].size() == 3 ? token[PH][1] : '\0';
        Group* group;
        if (phase == 'X') {
            if (token[CAT].size() == 2) return false;
            group = complete_group(token[CAT]);
            if (group == candidate_.get()) {
                if (groups.size() >= MOST_GROUPS) return false;
                groups.push_back(std::move(candidate_));
                last_ = group;
            }
        } else if (phase == 'i') {
            const string_view name = token[NAME];
            if (!name_has_escape && name.substr(1, name.size() - 2) != instant_name_) return true;  // has no table
            group = group_of_phase('i');
            is_odd_ |= name_has_escape;
        } else {
            group = group_of_phase(phase == 's' || phase == 'f' ? phase : '\0');
        }
        const auto offset = [this](const char* place) { return static_cast<uint32_t>(place - text_.data()); };
        group->spans.push_back(offset(span.data()));
        group->spans.push_back(offset(span.data() + span.size()));
        if (phase == 's' || phase == 'f') return add_flow(*group, token, start);
        if (kind < 0) return true;
        group->is_odd |= is_odd_ || !start.is_set || (phase == 'X' && !duration.is_set);
        if (group->is_odd) return true;
        add_row(*group, token, start);
        group->duration_ns.push_back(duration.ns);
        const uint32_t name = group->names.code(token[NAME]);
        group->name_codes.push_back(name);
        return name != NO_CODE && group->lane_codes.back() != NO_CODE && add_arguments(*group, static_cast<size_t>(kind));
    }

    void add_row(Group& group, const string_view (&token)[KEYS], const Time& start) {
        group.start_ns.push_back(start.ns);
        group.lane_codes.push_back(group.lanes.code(token[PID], token[TID]));
    }

    bool add_flow(Group& group, const string_view (&token)[KEYS], const Time& start) {
        int64_t id = 0;
        group.is_odd |= !start.is_set || token[ID].empty() || token[ID][0] == '"' || !integer_of(token[ID], id);
        if (group.is_odd) return true;
        add_row(group, token, start);
        group.ids.push_back(id);
        const uint32_t category = group.categories.code(token[CAT]);
        group.category_codes.push_back(category);
        return category != NO_CODE && group.lane_codes.back() != NO_CODE;
    }

    bool add_arguments(Group& group, size_t kind) {
        const size_t row = group.rows() - 1;
        const std::vector<Value>& values = values_[kind];
        for (size_t field = 0; field < values.size(); ++field) {
            const Value& value = values[field];
            Column& column = group.columns[field];
            if (!value.is_set) {
                if (column.used) column.pad(row + 1);
                continue;
            }
            if (!column.used) {
                column.used = true;
                column.pad(row);
            }
            if (column.type == FieldType::integer) {
                column.integers.push_back(value.integer);
            } else if (column.type == FieldType::number) {
                column.numbers.push_back(value.number);
            } else {
                const uint32_t code = column.dictionary.code(value.token);
                if (code == NO_CODE) return false;
                column.codes.push_back(code);
            }
        }
        return true;
    }

    const string_view text_;
    const char* at_;
    const char* end_;
    const bool exact_;
    const std::vector<Kind>& kinds_;  // the last is that of instants
    const string_view instant_name_;
    std::vector<KeyOrder> orders_;
    std::vector<std::vector<Value>> values_;
    KeyOrder event_order_;
    Group *last_ = nullptr, *instants_ = nullptr, *sources_ = nullptr, *targets_ = nullptr, *others_ = nullptr;
    std::unique_ptr<Group> candidate_;
    bool has_escape_ = false, is_whole_ = false, is_odd_ = false;
    bool has_large_ = false, has_large_duration_ = false, has_fine_ = false;
};

// An owned reference to a Python object.
struct Release {
    void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

struct PythonError {};  // a Python exception is set

PyObject* checked(PyObject* object) {
    if (object == nullptr) throw PythonError();
    return object;
}

Owned bytes_of(const char* data, size_t size) {
    return Owned(checked(PyBytes_FromStringAndSize(data, static_cast<Py_ssize_t>(size))));
}

template <class Number>
Owned bytes_of(const std::vector<Number>& numbers) {
    return bytes_of(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number));
}

Owned bytes_of(const std::string& text) { return bytes_of(text.data(), text.size()); }

template <class... Items>
Owned tuple_of(Items... items) {
    Owned tuple(checked(PyTuple_New(sizeof...(items))));
    Py_ssize_t place = 0;
    (static_cast<void>(PyTuple_SetItem(tuple.get(), place++, items.release())), ...);
    return tuple;
}

Owned none() {
    Py_INCREF(Py_None);
    return Owned(Py_None);
}

Owned column_object(const Column& column) {
    if (!column.used) return none();
    if (column.type == FieldType::integer) return bytes_of(column.integers);
    if (column.type == FieldType::number) return bytes_of(column.numbers);
    return tuple_of(bytes_of(column.codes), bytes_of(column.dictionary.json()));
}

Owned group_object(const Group& group) {
    Owned spans = bytes_of(group.spans);
    Owned phase = bytes_of(&group.phase, group.phase == 0 ? 0 : 1);
    Owned category = bytes_of(group.category.data(), group.category.size());
    const bool has_rows = (group.kind >= 0 || group.phase == 's' || group.phase == 'f') && !group.is_odd;
    if (!has_rows) return tuple_of(std::move(phase), std::move(category), std::move(spans), none());
    Owned columns(checked(PyTuple_New(static_cast<Py_ssize_t>(group.columns.size()))));
    for (size_t index = 0; index < group.columns.size(); ++index) {
        PyTuple_SetItem(columns.get(), static_cast<Py_ssize_t>(index), column_object(group.columns[index]).release());
    }
    const bool is_flow = group.kind < 0;
    Owned lanes = tuple_of(bytes_of(group.lane_codes), bytes_of(group.lanes.json()));
    Owned texts = is_flow ? tuple_of(bytes_of(group.category_codes), bytes_of(group.categories.json()))
                          : tuple_of(bytes_of(group.name_codes), bytes_of(group.names.json()));
    Owned rows = tuple_of(bytes_of(group.start_ns), bytes_of(is_flow ? group.ids : group.duration_ns), std::move(texts),
                          std::move(lanes), std::move(columns));
    return tuple_of(std::move(phase), std::move(category), std::move(spans), std::move(rows));
}

Owned result_object(const Scanner& scanner) {
    Owned groups(checked(PyList_New(0)));
    for (const auto& group : scanner.groups) {
        if (PyList_Append(groups.get(), group_object(*group).get()) < 0) throw PythonError();
    }
    Owned events(checked(PyLong_FromSize_t(scanner.events)));
    Owned end(checked(PyLong_FromLongLong(scanner.end_of_array)));
    Owned needs_exact(checked(PyBool_FromLong(scanner.needs_exact)));
    return tuple_of(std::move(events), std::move(end), std::move(needs_exact), std::move(groups));
}

string_view view_of(PyObject* object) {
    char* data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(object, &data, &size) < 0) throw PythonError();
    return {data, static_cast<size_t>(size)};
}

PyObject* item(PyObject* tuple, Py_ssize_t place) { return checked(PyTuple_GetItem(tuple, place)); }

Py_ssize_t length(PyObject* tuple) {
    const Py_ssize_t size = PyTuple_Size(tuple);
    if (size < 0) throw PythonError();
    return size;
}

// Kinds are given as ((categories, ((key, type), ...)), ...).
std::vector<Kind> kinds_of(PyObject* given) {
    std::vector<Kind> kinds(static_cast<size_t>(length(given)));
    for (size_t index = 0; index < kinds.size(); ++index) {
        PyObject* pair = item(given, static_cast<Py_ssize_t>(index));
        PyObject* categories = item(pair, 0);
        for (Py_ssize_t place = 0; place < length(categories); ++place) {
            kinds[index].categories.emplace_back(view_of(item(categories, place)));
        }
        PyObject* fields = item(pair, 1);
        for (Py_ssize_t place = 0; place < length(fields); ++place) {
            PyObject* field = item(fields, place);
            const long type = PyLong_AsLong(item(field, 1));
            if (type < 0 || type > static_cast<long>(FieldType::refused) || place >= 64) {
                if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no such field");
                throw PythonError();
            }
            kinds[index].fields.push_back({std::string(view_of(item(field, 0))), static_cast<FieldType>(type)});
        }
    }
    if (kinds.empty()) {
        PyErr_SetString(PyExc_ValueError, "no kinds");
        throw PythonError();
    }
    return kinds;
}

// The scan itself, without the interpreter's lock; whether the text was accepted.
template <class Scan>
bool run_unlocked(Scan& scanner) {
    PyThreadState* state = PyEval_SaveThread();
    bool is_accepted = false, is_out_of_memory = false;
    try {
        is_accepted = scanner.run();
    } catch (...) {  // nothing may pass while the lock is not held
        is_out_of_memory = true;
    }
    PyEval_RestoreThread(state);
    if (is_out_of_memory) throw std::bad_alloc();
    return is_accepted;
}

PyObject* scan(PyObject*, PyObject* arguments) {
    PyObject *text_object, *kinds_object, *instant_object;
    int exact;
    if (!PyArg_ParseTuple(arguments, "SpO!S:scan", &text_object, &exact, &PyTuple_Type, &kinds_object, &instant_object)) {
        return nullptr;
    }
    try {
        const string_view text = view_of(text_object);
        if (text.size() >= MOST_BYTES) return none().release();
        const std::vector<Kind> kinds = kinds_of(kinds_object);
        Scanner scanner(text, exact != 0, kinds, view_of(instant_object));
        if (!run_unlocked(scanner)) return none().release();
        return result_object(scanner).release();
    } catch (const PythonError&) {
        return nullptr;
    } catch (const std::exception&) {  // a container could not grow
        return PyErr_NoMemory();
    }
}

PyObject* xplane_events(PyObject*, PyObject* arguments) {
    PyObject *data_object, *roles_object;
    if (!PyArg_ParseTuple(arguments, "SS:xplane_events", &data_object, &roles_object)) return nullptr;
    try {
        const string_view data = view_of(data_object), written = view_of(roles_object);
        std::vector<int64_t> roles(written.size() / sizeof(int64_t));
        if (!roles.empty()) std::memcpy(roles.data(), written.data(), roles.size() * sizeof(int64_t));
        xplane::Events events(reinterpret_cast<const uint8_t*>(data.data()), data.size(), roles);
        if (!run_unlocked(events)) return none().release();
        Owned statistics = tuple_of(bytes_of(events.stat_roles), bytes_of(events.stat_events), bytes_of(events.stat_tags),
                                    bytes_of(events.stat_numbers), bytes_of(events.stat_contents));
        Owned consumed(checked(PyLong_FromLongLong(events.consumed)));
        return tuple_of(std::move(consumed), bytes_of(events.names), bytes_of(events.starts_ns), bytes_of(events.durations_ns),
                        bytes_of(events.lasts), std::move(statistics)).release();
    } catch (const PythonError&) {
        return nullptr;
    } catch (const std::exception&) {  // a container could not grow
        return PyErr_NoMemory();
    }
}

// The texts as Python's; nothing if one is not UTF-8.
Owned texts_object(const std::vector<string_view>& texts) {
    Owned list(checked(PyList_New(static_cast<Py_ssize_t>(texts.size()))));
    for (size_t row = 0; row < texts.size(); ++row) {
        const string_view text = texts[row];
        PyObject* object = text.data() == nullptr
            ? none().release()
            : PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "strict");
        if (object == nullptr) {
            if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) throw PythonError();
            PyErr_Clear();
            return nullptr;
        }
        PyList_SetItem(list.get(), static_cast<Py_ssize_t>(row), object);
    }
    return list;
}

PyObject* sqlite_rows(PyObject*, PyObject* arguments) {
    PyObject *pages_object, *wanted;
    Py_ssize_t page_size, usable, skip, most;
    if (!PyArg_ParseTuple(arguments, "SnnO!nn:sqlite_rows", &pages_object, &page_size, &usable, &PyTuple_Type, &wanted, &skip,
                          &most)) {
        return nullptr;
    }
    if (page_size < 512 || usable < 480 || usable > page_size || skip < 0 || most < 0) {
        PyErr_SetString(PyExc_ValueError, "no such pages");
        return nullptr;
    }
    try {
        std::vector<sqlite::Column> columns;
        for (Py_ssize_t index = 0; index < length(wanted); ++index) {
            PyObject* pair = item(wanted, index);
            const unsigned long place = PyLong_AsUnsignedLong(item(pair, 0));
            const int is_text = PyObject_IsTrue(item(pair, 1));
            if (PyErr_Occurred() || is_text < 0) throw PythonError();
            columns.push_back({place, is_text != 0, {}, {}});
        }
        sqlite::Rows rows(view_of(pages_object), static_cast<size_t>(page_size), static_cast<size_t>(usable),
                          std::move(columns), static_cast<size_t>(skip), static_cast<size_t>(most));
        if (!run_unlocked(rows)) return none().release();
        Owned made(checked(PyTuple_New(static_cast<Py_ssize_t>(rows.columns.size()))));
        for (size_t index = 0; index < rows.columns.size(); ++index) {
            const sqlite::Column& column = rows.columns[index];
            Owned values = column.is_text ? texts_object(column.texts) : bytes_of(column.integers);
            if (!values) return none().release();
            PyTuple_SetItem(made.get(), static_cast<Py_ssize_t>(index), values.release());
        }
        Owned count(checked(PyLong_FromSize_t(rows.rows))), page(checked(PyLong_FromSize_t(rows.next_page)));
        Owned cell(checked(PyLong_FromSize_t(rows.next_cell)));
        return tuple_of(std::move(count), std::move(made), std::move(page), std::move(cell)).release();
    } catch (const PythonError&) {
        return nullptr;
    } catch (const std::exception&) {  // a container could not grow
        return PyErr_NoMemory();
    }
}

PyMethodDef methods[] = {
    {"scan", scan, METH_VARARGS,
     "scan(text, exact, kinds, instant) -> (events, end of the array or -1, needs exact, groups) or None\n--\n\n"
     "Scan comma-separated events into columns; None if the text must be read in another way."},
    {"sqlite_rows", sqlite_rows, METH_VARARGS,
     "sqlite_rows(pages, page_size, usable, wanted, skip, most) -> (rows, columns, next page, next cell) or None\n--\n\n"
     "Decode rows of a table of an SQLite file from leaf pages; None if SQLite must read them."},
    {"xplane_events", xplane_events, METH_VARARGS,
     "xplane_events(data, roles) -> (bytes decoded, names, starts, durations, whether they last, statistics) or None\n--\n\n"
     "Decode the events of a line into columns; None if they must be decoded in another way."},
    {nullptr, nullptr, 0, nullptr},
};

int add_constants(PyObject* made) { return PyModule_AddIntConstant(made, "INTERFACE", INTERFACE); }

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(add_constants)},
    {0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_scanner", "Scans the text of trace events into columns.", 0, methods, slots,
                      nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__scanner() { return PyModuleDef_Init(&module); }
