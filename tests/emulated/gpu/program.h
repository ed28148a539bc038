// PTX as text, taken apart: statements with operands, each operand a slot of the register file or
// an address.
#pragma once

#include <cctype>
#include <cstdint>
#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A register, a constant (which has a register, too), a list of them in braces, or an address in
// brackets.
struct Operand {
  enum Kind { REGISTER, LIST, ADDRESS, PARAMETER, NONE } kind = NONE;
  int slot = 0;
  bool negated = false;  // of a predicate
  int64_t offset = 0;    // of an address
  std::vector<Operand> list;
};

struct Statement {
  std::string opcode;
  std::vector<std::string> words;  // the opcode between its dots
  std::vector<Operand> operands;
  int guard = -1;  // a predicate's slot
  bool guard_negated = false;
  int target = -1;  // of a branch
  std::string text, source;

  bool has(const char* word) const {
    for (auto& x : words)
      if (x == word) return true;
    return false;
  }
  const std::string& type() const { return words.back(); }
};

class Program {
 public:
  std::vector<Statement> statements;
  std::vector<std::pair<int, int>> parameters;  // offset and bytes of each
  int parameter_bytes = 0;
  int slots = 0;
  std::map<int, uint64_t> constants;   // slot -> bits
  std::map<std::string, int> special;  // %tid.x ... -> slot
  int threads = 0, local_bytes = 0;

  explicit Program(const std::string& text) {
    std::istringstream lines(text);
    std::string line, pending, source;
    bool body = false;
    while (std::getline(lines, line)) {
      auto comment = line.find("//");
      if (line.find(".loc") != std::string::npos && comment != std::string::npos)
        source = trimmed(line.substr(comment + 2));
      if (comment != std::string::npos) line.resize(comment);
      line = trimmed(line);
      if (line.empty()) continue;
      if (!body) {
        head(line);
        if (line == "{") body = true;
        continue;
      }
      if (line == "}" && pending.empty()) break;  // what follows is for debuggers
      if (line.rfind(".local", 0) == 0) local_bytes += std::stoi(line.substr(line.find('[') + 1));
      if (line[0] == '.' && line.rfind(".reg", 0) != 0) continue;
      pending += (pending.empty() ? "" : " ") + line;
      take(pending, source);
    }
    for (auto& [at, label] : branches_) {
      auto found = labels_.find(label);
      if (found == labels_.end()) throw Error("no label " + label);
      statements[at].target = found->second;
    }
  }

  int slot_of(const std::string& name) {
    auto [at, fresh] = slots_.try_emplace(name, slots);
    if (fresh) ++slots;
    return at->second;
  }

 private:
  std::map<std::string, int> slots_, labels_, offsets_;
  std::vector<std::pair<int, std::string>> branches_;

  static std::string trimmed(const std::string& text) {
    auto begin = text.find_first_not_of(" \t\r"), end = text.find_last_not_of(" \t\r");
    return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
  }

  void head(const std::string& line) {
    if (line.rfind(".reqntid", 0) == 0) threads = std::stoi(line.substr(8));
    if (line.rfind(".param", 0) != 0) return;
    std::istringstream words(line);
    std::string word, type, name;
    while (words >> word) {
      if (word.size() >= 3 && word[0] == '.' && std::isdigit(word.back()) && std::strchr("ubsf", word[1])) type = word;
      name = word;
    }
    if (name.back() == ',') name.pop_back();
    int bytes = std::stoi(type.substr(2)) / 8;
    parameter_bytes = (parameter_bytes + bytes - 1) / bytes * bytes;
    offsets_[name] = parameter_bytes;
    parameters.push_back({parameter_bytes, bytes});
    parameter_bytes += bytes;
  }

  // Labels and whole statements leave `pending`.
  void take(std::string& pending, const std::string& source) {
    for (;;) {
      pending = trimmed(pending);
      auto colon = pending.find(':');
      if (pending[0] == '$' && colon != std::string::npos && pending.find(' ') > colon) {
        labels_[pending.substr(0, colon)] = static_cast<int>(statements.size());
        pending.erase(0, colon + 1);
        continue;
      }
      auto end = pending.find(';');
      if (end == std::string::npos) return;
      auto text = trimmed(pending.substr(0, end));
      pending.erase(0, end + 1);
      if (text.rfind(".reg", 0) == 0 || text.empty()) continue;
      add(text, source);
    }
  }

  void add(const std::string& text, const std::string& source) {
    Statement s;
    s.text = text, s.source = source;
    std::string rest = text;
    if (rest[0] == '@') {
      auto space = rest.find(' ');
      s.guard_negated = rest[1] == '!';
      s.guard = slot_of(rest.substr(1 + s.guard_negated, space - 1 - s.guard_negated));
      rest = trimmed(rest.substr(space));
    }
    auto space = rest.find_first_of(" \t");
    s.opcode = rest.substr(0, space);
    std::string word;
    for (char c : s.opcode + ".") {
      if (c != '.')
        word += c;
      else if (!word.empty())
        s.words.push_back(word), word.clear();
    }
    rest = space == std::string::npos ? "" : trimmed(rest.substr(space));
    if (s.words[0] == "bra") {
      branches_.push_back({static_cast<int>(statements.size()), rest});
    } else {
      for (auto& part : split(rest)) {
        auto bar = part.find('|');  // setp and shfl may have two destinations
        if (bar != std::string::npos && part[0] == '%') {
          Operand two;
          two.kind = Operand::LIST;
          two.list = {operand(trimmed(part.substr(0, bar)), s.type()),
                      operand(trimmed(part.substr(bar + 1)), s.type())};
          s.operands.push_back(two);
        } else {
          s.operands.push_back(operand(part, s.type()));
        }
      }
    }
    statements.push_back(s);
  }

  static std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::string part;
    int depth = 0;
    for (char c : text + ",") {
      depth += (c == '{' || c == '[') - (c == '}' || c == ']');
      if (c == ',' && depth == 0) {
        if (auto one = trimmed(part); !one.empty()) parts.push_back(one);
        part.clear();
      } else {
        part += c;
      }
    }
    return parts;
  }

  Operand operand(std::string text, const std::string& type) {
    Operand one;
    if (text == "_") return one;
    if (text[0] == '{') {
      one.kind = Operand::LIST;
      for (auto& part : split(text.substr(1, text.size() - 2))) one.list.push_back(operand(part, type));
      return one;
    }
    if (text[0] == '[') {
      text = trimmed(text.substr(1, text.size() - 2));
      auto plus = text.find('+');
      auto base = trimmed(text.substr(0, plus));
      if (plus != std::string::npos) one.offset = std::stoll(trimmed(text.substr(plus + 1)), nullptr, 0);
      if (auto found = offsets_.find(base); found != offsets_.end()) {
        one.kind = Operand::PARAMETER;
        one.offset += found->second;
        return one;
      }
      one = {Operand::ADDRESS, operand(base, "b64").slot, false, one.offset, {}};
      return one;
    }
    one.kind = Operand::REGISTER;
    if (text[0] == '!') one.negated = true, text = trimmed(text.substr(1));
    if (text[0] == '%') {
      one.slot = slot_of(text);
      if (text.find('.') != std::string::npos || text == "%laneid" || text == "%warpid") special[text] = one.slot;
      return one;
    }
    one.slot = slot_of("constant " + text + " " + type);
    constants[one.slot] = constant(text);
    return one;
  }

  static uint64_t constant(const std::string& text) {
    if (text == "global_smem" || text == "__local_depot0") return 0;
    if (text.rfind("0f", 0) == 0 || text.rfind("0d", 0) == 0) return std::stoull(text.substr(2), nullptr, 16);
    if (text[0] == '-' || std::isdigit(text[0]))
      return text[0] == '-' ? static_cast<uint64_t>(std::stoll(text, nullptr, 0)) : std::stoull(text, nullptr, 0);
    throw Error("what is " + text + "?");
  }
};
