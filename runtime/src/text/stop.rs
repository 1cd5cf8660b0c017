/// The ids that end an answer: the union of what a checkpoint's files name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopIds(Vec<u32>);

impl StopIds {
    /// Whether generation ends with this id.
    pub fn contains(&self, id: u32) -> bool {
        self.0.binary_search(&id).is_ok()
    }

    /// The ids, ascending, each once.
    pub fn as_slice(&self) -> &[u32] {
        &self.0
    }
}

impl FromIterator<u32> for StopIds {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        let mut stops = Self::default();
        stops.extend(ids);
        stops
    }
}

impl Extend<u32> for StopIds {
    fn extend<I: IntoIterator<Item = u32>>(&mut self, ids: I) {
        self.0.extend(ids);
        self.0.sort_unstable();
        self.0.dedup();
    }
}
