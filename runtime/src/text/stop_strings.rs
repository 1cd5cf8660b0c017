/// Ends a text before the first of some strings, found wherever pieces are cut.
///
/// What may be the beginning of a string is held back until it can't be.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
}

impl StopStrings {
    /// Looks for these strings; an empty one is never found.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stops, held: String::new() }
    }

    /// Takes a piece, and returns the text that can't belong to a stop string any more, and
    /// whether one was found: then the text ends before it.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = found {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let keep = self.stops.iter().map(|stop| self.begun(stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// The text still held back, once no piece follows.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes of the longest beginning of `stop` that the held text ends with.
    fn begun(&self, stop: &str) -> usize {
        let lengths = stop.char_indices().map(|(at, _)| at).rev();
        lengths.into_iter().find(|at| self.held.ends_with(&stop[..*at])).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::StopStrings;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut strings = StopStrings::new(stops.iter().map(|stop| (*stop).to_owned()));
        let mut shown = String::new();
        for piece in pieces {
            let (text, found) = strings.push(piece);
            shown += &text;
            if found {
                return (shown, true);
            }
        }
        (shown + &strings.finish(), false)
    }

    #[test]
    fn a_string_is_found_wherever_the_text_is_cut() {
        let text = "One, two.\n\nUser: three";
        for stop in ["\n\nUser:", "\n\n", "two", "O", "🧿"] {
            let expected = match text.find(stop) {
                Some(at) => (text[..at].to_owned(), true),
                None => (text.to_owned(), false),
            };
            for first in 0..=text.len() {
                for second in first..=text.len() {
                    let pieces = [&text[..first], &text[first..second], &text[second..]];
                    assert_eq!(run(&[stop], &pieces), expected, "{stop:?} {pieces:?}");
                }
            }
        }
    }

    #[test]
    fn the_earliest_of_several_ends_the_text() {
        assert_eq!(run(&["cd", "bcx", ""], &["ab", "cd"]), ("ab".to_owned(), true));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".to_owned(), true));
        assert_eq!(run(&[], &["a", "b"]), ("ab".to_owned(), false));
    }

    #[test]
    fn only_a_beginning_is_held_back() {
        let mut strings = StopStrings::new(["END".to_owned()]);
        assert_eq!(strings.push("text E"), ("text ".to_owned(), false));
        assert_eq!(strings.push("N"), (String::new(), false));
        assert_eq!(strings.push("ough"), ("ENough".to_owned(), false));
    }
}
