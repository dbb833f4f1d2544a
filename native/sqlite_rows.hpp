// Decodes rows of a table of an SQLite file from its leaf pages; src/stepscope/readers/nsight_systems/database.py calls it
// through scanner.cpp.
//
// It reads only rows that SQLite would certainly return as they are, and refuses all others, which SQLite then reads. So
// it must be at least as strict as SQLite's checks of pages. It trusts no input and never reads past the end of a page.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <vector>

namespace sqlite {

constexpr uint8_t LEAF = 0x0D;
constexpr size_t HEADER_BYTES = 8, POINTER_BYTES = 2, LEAST_CELL_BYTES = 4;
constexpr size_t LONGEST_TEXT = 4000;  // as in database.py
constexpr int64_t NO_INTEGER = std::numeric_limits<int64_t>::min();

struct Column {
    uint64_t place;  // in the record
    bool is_text;
    std::vector<int64_t> integers;       // NO_INTEGER for null
    std::vector<std::string_view> texts; // without data for null
};

class Rows {
public:
    // Wanted columns are in the order of their places; `usable` is the page's size without what is reserved at its end.
    Rows(std::string_view pages, size_t page_size, size_t usable, std::vector<Column> wanted, size_t skip, size_t most)
        : columns(std::move(wanted)), next_cell(skip), pages_(reinterpret_cast<const uint8_t*>(pages.data())),
          size_(pages.size()), page_size_(page_size), usable_(usable), most_(most) {}

    // Decode up to `most` rows after the first `skip`; false if the rows are refused.
    bool run() {
        for (; size_ - next_page >= page_size_; next_page += page_size_, next_cell = 0) {
            const uint8_t* const page = pages_ + next_page;
            const size_t cells = two(page + 3), first = HEADER_BYTES + POINTER_BYTES * cells;
            if (page[0] != LEAF || first > usable_) return false;
            for (; next_cell < cells; ++next_cell) {
                if (rows == most_) return true;
                const size_t place = two(page + HEADER_BYTES + POINTER_BYTES * next_cell);
                if (place < first || place + LEAST_CELL_BYTES > usable_) return false;
                if (!cell(page + place, page + usable_)) return false;
                ++rows;
            }
        }
        return true;
    }

    std::vector<Column> columns;
    size_t rows = 0;
    size_t next_page = 0;  // where the page begins that has the next row
    size_t next_cell;      // which of its rows that is

private:
    static size_t two(const uint8_t* at) { return size_t{at[0]} << 8 | at[1]; }

    // SQLite's variable-length integers: seven bits a byte, eight in the ninth.
    static bool number(const uint8_t*& at, const uint8_t* end, uint64_t& value) {
        value = 0;
        for (int count = 0; count < 9 && at < end; ++count) {
            const uint8_t byte = *at++;
            if (count == 8) {
                value = value << 8 | byte;
                return true;
            }
            value = value << 7 | (byte & 0x7Fu);
            if (byte < 0x80) return true;
        }
        return false;
    }

    bool cell(const uint8_t* at, const uint8_t* end) {
        uint64_t payload, key, header;
        if (!number(at, end, payload) || !number(at, end, key)) return false;
        if (payload > usable_ - 35 || payload > static_cast<uint64_t>(end - at)) return false;  // more is on other pages
        end = at + payload;
        const uint8_t* const record = at;
        if (!number(at, end, header) || header > payload) return false;
        const uint8_t* const types = record + header;
        const uint8_t* value = types;
        size_t wanted = 0;
        for (uint64_t place = 0; at < types; ++place) {
            uint64_t type;
            if (!number(at, types, type)) return false;
            static constexpr uint8_t SIZES[12] = {0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0};
            const uint64_t size = type < 12 ? SIZES[type] : (type - 12) / 2;
            if (type == 10 || type == 11 || size > static_cast<uint64_t>(end - value)) return false;
            if (wanted < columns.size() && place == columns[wanted].place) {
                if (!add(columns[wanted++], type, value, size)) return false;
            }
            value += size;
        }
        return at == types && value == end && wanted == columns.size();
    }

    static bool add(Column& column, uint64_t type, const uint8_t* at, size_t size) {
        if (column.is_text) {
            const bool is_text = type >= 13 && type % 2 == 1 && size <= LONGEST_TEXT;
            if (type != 0 && (!is_text || std::memchr(at, 0, size) != nullptr)) return false;
            column.texts.push_back(type == 0 ? std::string_view() : std::string_view(reinterpret_cast<const char*>(at), size));
            return true;
        }
        if (type == 0) {
            column.integers.push_back(NO_INTEGER);
            return true;
        }
        if (type == 7 || type > 9) return false;
        uint64_t value = size != 0 && at[0] >= 0x80 ? ~uint64_t{0} : 0;
        for (size_t place = 0; place < size; ++place) value = value << 8 | at[place];
        if (type >= 8) value = type - 8;
        column.integers.push_back(static_cast<int64_t>(value));
        return column.integers.back() != NO_INTEGER;
    }

    const uint8_t* pages_;
    size_t size_, page_size_, usable_, most_;
};

}  // namespace sqlite
