// Decodes the events of a line of an XLA profile; src/stepscope/readers/xplane/events.py calls it through scanner.cpp.
//
// It reads only runs of events that are written as all profilers write them. For anything else it refuses the run, and
// the Python reader decodes it: damage has one handling. It trusts no input and never reads past the end of the data.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace xplane {

constexpr uint8_t NAME = 0x08, OFFSET = 0x10, DURATION = 0x18, STATISTIC = 0x22;  // fields of an event
constexpr uint8_t EVENT = 0x22;                                                  // the field of a line
constexpr uint8_t STATISTIC_ID = 0x08, DOUBLE = 0x11, TEXT = 0x2A, BYTES = 0x32;  // fields of a statistic
constexpr int MOST_STATISTICS = 1000;                                            // as in events.py
constexpr uint64_t LATEST_PS = uint64_t{1} << 62;
constexpr int LONGEST_LENGTH_BYTES = 5;

class Events {
public:
    // Statistics get the role at their number's place, if it is above 0.
    Events(const uint8_t* data, size_t size, const std::vector<int64_t>& roles)
        : begin_(data), at_(data), end_(data + size), roles_(roles) {}

    // Decode the events at the start of the data, as many as are there in full; false if the run is refused.
    bool run() {
        while (at_ < end_ && *at_ == EVENT) {
            const uint8_t* const event = at_++;
            uint64_t length;
            if (!number(length) || length > static_cast<uint64_t>(end_ - at_)) {
                at_ = event;  // it ends behind the data
                break;
            }
            if (at_ - event > 1 + LONGEST_LENGTH_BYTES || !one(at_ + length)) return false;
        }
        consumed = at_ - begin_;
        return true;
    }

    int64_t consumed = 0;
    std::vector<int64_t> names, starts_ns, durations_ns;  // times from the start of the line
    std::vector<uint8_t> lasts;                           // whether a duration is written
    std::vector<int64_t> stat_roles, stat_events, stat_contents;
    std::vector<uint8_t> stat_tags;
    std::vector<uint64_t> stat_numbers;

private:
    bool number(uint64_t& value) {
        value = 0;
        for (int shift = 0; shift < 64 && at_ < end_; shift += 7) {
            const uint8_t byte = *at_++;
            value |= uint64_t{byte & 0x7Fu} << shift;
            if (byte < 0x80) return true;
        }
        return false;
    }

    bool one(const uint8_t* end) {
        uint64_t name = 0, offset = 0, duration = 0;
        if (has(NAME, end) && !number(name)) return false;
        if (has(OFFSET, end) && !number(offset)) return false;
        const bool lasting = has(DURATION, end);
        if (lasting && !number(duration)) return false;
        if (offset > LATEST_PS || duration > LATEST_PS || offset + duration >= uint64_t{1} << 63) return false;
        for (int count = 0; at_ < end; ++count) {
            uint64_t length;
            if (count == MOST_STATISTICS || *at_++ != STATISTIC || !number(length)) return false;
            if (at_ > end || length > static_cast<uint64_t>(end - at_) || !statistic(at_ + length)) return false;
        }
        if (at_ != end) return false;
        names.push_back(static_cast<int64_t>(name));
        starts_ns.push_back(static_cast<int64_t>(offset / 1000));
        durations_ns.push_back(static_cast<int64_t>((offset + duration) / 1000 - offset / 1000));
        lasts.push_back(lasting);
        return true;
    }

    // Whether a field with this tag comes next; moves behind the tag.
    bool has(uint8_t tag, const uint8_t* end) {
        if (at_ >= end || *at_ != tag) return false;
        ++at_;
        return true;
    }

    bool statistic(const uint8_t* end) {
        uint64_t id = 0, value;
        const bool has_id = end - at_ > 2 && *at_ == STATISTIC_ID;
        if (has_id) {
            ++at_;
            if (!number(id)) return false;
        }
        if (!has_id || at_ >= end || id >= roles_.size() || roles_[id] <= 0) {
            at_ = end;  // one that is not wanted
            return true;
        }
        const uint8_t tag = *at_++;
        if (tag == DOUBLE) {
            if (end_ - at_ < 8) return false;
            std::memcpy(&value, at_, 8);
            at_ += 8;
        } else if (!number(value)) {
            return false;
        }
        const bool is_text = tag == TEXT || tag == BYTES;
        if (at_ > end || (is_text && value > static_cast<uint64_t>(end - at_))) {
            at_ = end;
            return true;
        }
        stat_roles.push_back(roles_[id]);
        stat_events.push_back(static_cast<int64_t>(names.size()));
        stat_tags.push_back(tag);
        stat_numbers.push_back(value);
        stat_contents.push_back(at_ - begin_);
        at_ = end;
        return true;
    }

    const uint8_t* begin_;
    const uint8_t* at_;
    const uint8_t* end_;
    const std::vector<int64_t>& roles_;
};

}  // namespace xplane
